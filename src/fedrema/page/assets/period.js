// The mean gap, and its ratio to the peak against δ.
function drawPeriod() {
  const runs = parts.main.runs.filter((run) => run.series.gap_ratio);
  if (!runs.length) return { empty: 'Only FedReMa has a critical period: none of these runs measured a gap.' };
  const data = [];
  const named = new Set();
  const most = Math.max(...runs.flatMap((run) => run.series.gap_ratio.rounds));
  for (const run of runs) {
    const group = parts.main.groups[run.group];
    const chosen = run === currentRun() || runs.length === 1;
    for (const [quantity, yaxis, factor] of [
      ['mean_gap', 'y', 1],
      ['gap_ratio', 'y2', 100],
    ]) {
      const series = run.series[quantity];
      if (!series) continue;
      data.push({
        type: 'scatter',
        mode: most > 60 ? 'lines' : 'lines+markers',
        yaxis,
        x: series.rounds,
        y: series.values.map((value) => factor * value),
        name: safe(runLabel(run)),
        legendgroup: runLabel(run),
        showlegend: !named.has(runLabel(run)),
        line: { color: ink(group.colour), width: chosen ? 2.6 : 1.2, dash: group.dash },
        marker: { size: 5 },
        opacity: chosen ? 1 : 0.5,
        hovertemplate: `round %{x}: %{y:.${factor === 1 ? 3 : 0}f}${factor === 1 ? '' : ' %'}<extra>${safe(runLabel(run))}</extra>`,
      });
      named.add(runLabel(run));
    }
  }
  const deltas = [...new Set(runs.map((run) => run.delta).filter((delta) => delta != null))];
  const shapes = deltas.map((delta) => ({
    type: 'line',
    xref: 'paper',
    x0: 0,
    x1: 1,
    yref: 'y2',
    y0: 100 * delta,
    y1: 100 * delta,
    line: { color: css('ink'), dash: 'dash', width: 1.5 },
  }));
  const annotations = deltas.map((delta) => ({
    xref: 'paper',
    x: 1,
    xanchor: 'right',
    yref: 'y2',
    y: 100 * delta,
    yanchor: 'bottom',
    text: `δ = ${delta}`,
    showarrow: false,
  }));
  return {
    data,
    layout: {
      height: 440,
      shapes,
      annotations,
      showlegend: runs.length > 1 && runs.length <= 12,
      xaxis: roundAxis(
        runs.flatMap((run) => run.series.gap_ratio.rounds),
        { anchor: 'y2' },
      ),
      yaxis: axis({ title: 'mean gap', domain: [0.56, 1], rangemode: 'tozero' }),
      yaxis2: axis({ title: '% of its peak', domain: [0, 0.44], range: [0, 106] }),
    },
    words: runs
      .map(
        (run) =>
          `${runLabel(run)}: the ratio ends at ${percent(run.series.gap_ratio.values.at(-1), 0)} in round ${run.series.gap_ratio.rounds.at(-1)}`,
      )
      .join('; '),
    caption:
      'Early on, similar and dissimilar clients are far apart: the gap between them is wide, and peers are easy to tell. As training goes on all classifiers become alike and the gap closes. Once it has fallen to the share δ of its peak (dashed), the critical period ends: no new peers are sought, and no gap is measured any more.',
    rows: () => [
      ['run', 'round', 'mean_gap', 'ratio_to_peak', 'delta'],
      ...runs.flatMap((run) =>
        run.series.gap_ratio.rounds.map((round, at) => [
          runLabel(run),
          round,
          run.series.mean_gap?.values[at],
          run.series.gap_ratio.values[at],
          run.delta,
        ]),
      ),
    ],
  };
}
