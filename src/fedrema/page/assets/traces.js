// Quantities that a method traces by round: a panel for each, and the threshold that ends the method's period.
function drawTraces() {
  const all = parts.main.runs;
  const shown = [currentRun(), ...all].find((run) => Object.keys(run.series).length);
  if (!shown) return { empty: 'The methods of these runs trace no quantity of their own.' };
  const { traces, period } = reportsOf(shown);
  const panels = traces.filter((trace) => shown.series[trace.name]);
  const runs = all.filter((run) => panels.some((trace) => run.series[trace.name]));
  const group = parts.main.groups[shown.group];
  byId('traces-heading').textContent = period?.measure
    ? `End of the ${period.title} of ${group.label}`
    : `Quantities of ${group.label} by round`;
  const rounds = runs.flatMap((run) => panels.flatMap((trace) => run.series[trace.name]?.rounds ?? []));
  const data = [];
  const shapes = [];
  const annotations = [];
  const layout = {};
  const named = new Set();
  const end = Object.values(group.curves).find((curve) => curve.period_end != null)?.period_end;
  panels.forEach((trace, at) => {
    const axisName = at ? `y${at + 1}` : 'y';
    const factor = trace.percent ? 100 : 1;
    const unit = trace.percent ? ' %' : '';
    const room = 1 / panels.length;
    layout[at ? `yaxis${at + 1}` : 'yaxis'] = axis({
      title: `${trace.title}${trace.percent ? ' (%)' : ''}`,
      domain: [1 - (at + 1) * room + (at === panels.length - 1 ? 0 : 0.12 * room), 1 - at * room],
      rangemode: 'tozero',
    });
    for (const run of runs.filter((one) => one.series[trace.name])) {
      const series = run.series[trace.name];
      const look = parts.main.groups[run.group];
      const chosen = run === currentRun() || runs.length === 1;
      const label = runLabel(run);
      data.push({
        type: 'scatter',
        mode: Math.max(...rounds) > 60 ? 'lines' : 'lines+markers',
        yaxis: axisName,
        x: series.rounds,
        y: series.values.map((value) => factor * value),
        name: safe(label),
        legendgroup: label,
        showlegend: !named.has(label),
        line: { color: ink(look.colour), width: chosen ? 2.6 : 1.2, dash: look.dash },
        marker: { size: 5 },
        opacity: chosen ? 1 : 0.5,
        hovertemplate: `round %{x}: %{y:.3~g}${unit}<extra>${safe(label)}</extra>`,
      });
      named.add(label);
    }
    if (trace.name !== period?.measure) return;
    for (const threshold of new Set(runs.map((run) => run.threshold).filter((value) => value != null))) {
      const y = factor * threshold;
      shapes.push({
        ...{ type: 'line', xref: 'paper', x0: 0, x1: 1, yref: axisName, y0: y, y1: y },
        line: { color: css('ink'), dash: 'dash', width: 1.5 },
      });
      annotations.push({
        ...{ xref: 'paper', x: 1, xanchor: 'right', yref: axisName, y, yanchor: 'bottom', showarrow: false },
        text: `${safe(period.threshold)} = ${threshold}`,
      });
    }
  });
  const dashed = shapes.length ? `Dashed: ${period.threshold}.` : '';
  if (end != null)
    shapes.push({
      ...{ type: 'line', x0: end, x1: end, yref: 'paper', y0: 0, y1: 1 },
      line: { color: ink(group.colour), width: 1.5, dash: 'dot' },
    });
  return {
    data,
    layout: {
      height: 140 + 150 * panels.length,
      shapes,
      annotations,
      showlegend: runs.length > 1 && runs.length <= 12,
      xaxis: roundAxis(rounds, { anchor: panels.length > 1 ? `y${panels.length}` : 'y' }),
      ...layout,
    },
    words: panels
      .map((trace) => {
        const { rounds: measured, values } = shown.series[trace.name];
        return `${trace.title} of ${runLabel(shown)}: ${+values.at(-1).toPrecision(3)} in round ${measured.at(-1)}`;
      })
      .join('; '),
    caption: [
      `${capitalised(panels.map((trace) => trace.title).join(', '))} by round.`,
      period?.description,
      ...panels.map((trace) => trace.description),
      dashed,
      end != null ? `Dotted: end of the ${period.title}.` : '',
    ]
      .filter(Boolean)
      .join(' '),
    rows: () => [
      ['run', 'round', ...panels.map((trace) => trace.name), ...(period?.threshold ? [period.threshold] : [])],
      ...runs.flatMap((run) =>
        [...new Set(panels.flatMap((trace) => run.series[trace.name]?.rounds ?? []))].map((round) => [
          runLabel(run),
          round,
          ...panels.map((trace) => run.series[trace.name]?.values[run.series[trace.name].rounds.indexOf(round)]),
          ...(period?.threshold ? [run.threshold] : []),
        ]),
      ),
    ],
  };
}
