// Curves by round, with a band over seeds, the end of methods' periods, and the selected client.
const explained = {
  accuracy: "Share of test samples that the clients' own models classify correctly, over all clients.",
  worst_tenth: 'Mean accuracy of the tenth of the clients with the lowest accuracy.',
  trained_accuracy: 'Accuracy right after local training, before aggregation.',
  loss: 'Mean loss of local training. A low loss with a low accuracy indicates overfitting.',
};

// Low values of the first rounds would compress the rest: they may be cut off.
function firstRoundsCut(curves) {
  if (Math.min(...curves.map((curve) => curve.rounds.length)) < 10) return null;
  const later = curves.flatMap((curve) => curve.low.slice(Math.max(2, Math.floor(curve.low.length / 8))));
  const highest = Math.max(...curves.flatMap((curve) => curve.high));
  const lowest = Math.min(...later, highest - 10);
  const all = highest - Math.min(...curves.flatMap((curve) => curve.low));
  const margin = 0.06 * (highest - lowest);
  return highest - lowest + 2 * margin > 0.6 * all ? null : [lowest - margin, highest + margin];
}

function drawLearning() {
  const quantity = state.quantity;
  const groups = parts.main.groups.filter((group) => group.curves[quantity]);
  if (!groups.length) return { empty: 'No round has been evaluated yet.' };
  const isShare = quantity !== 'loss';
  const every = groups.flatMap((group) => group.curves[quantity].rounds);
  const data = [];
  const shapes = [];
  const ended = new Set();
  const faint = groups.length > 4 ? 0.1 : 0.18;
  let banded = false;
  for (const group of groups) {
    const curve = group.curves[quantity];
    if (group.seeds > 1) {
      banded = true;
      data.push({
        type: 'scatter',
        mode: 'lines',
        line: { width: 0 },
        fill: 'toself',
        fillcolor: faded(group.colour, faint),
        hoverinfo: 'skip',
        showlegend: false,
        legendgroup: group.label,
        x: [...curve.rounds, ...[...curve.rounds].reverse()],
        y: [...curve.high, ...[...curve.low].reverse()],
      });
    }
    if (curve.period_end != null) {
      ended.add(group.reports.period.title);
      shapes.push({
        type: 'line',
        x0: curve.period_end,
        x1: curve.period_end,
        yref: 'paper',
        y0: 0,
        y1: 1,
        line: { color: ink(group.colour), width: 1.5, dash: 'dot' },
      });
    }
  }
  for (const group of groups) {
    const curve = group.curves[quantity];
    data.push({
      type: 'scatter',
      mode: curve.rounds.length < 3 ? 'lines+markers' : 'lines',
      name: safe(group.label),
      legendgroup: group.label,
      x: curve.rounds,
      y: curve.mean,
      line: { color: ink(group.colour), dash: group.dash, width: 1.8 * group.emphasis },
      opacity: state.client == null ? 1 : 0.45,
      hovertemplate: `round %{x}: %{y:.${isShare ? 1 : 3}f}${isShare ? ' %' : ''}<extra>${safe(group.label)}</extra>`,
    });
  }
  const own = { accuracy: 'accuracy', trained_accuracy: 'trained', loss: 'loss' }[quantity];
  const table = unpack(clientsOfRun()?.[own]);
  if (state.client != null && table) {
    data.push({
      type: 'scatter',
      mode: 'lines+markers',
      name: `client ${safe(nameOf(state.client))}`,
      x: clientsOfRun().rounds,
      y: columnOf(table, state.client).map((value) => value * (isShare ? 100 : 1)),
      line: { color: css('ink'), width: 2.2 },
      marker: { size: 4, color: css('ink') },
      connectgaps: true,
      hovertemplate: `round %{x}: %{y:.${isShare ? 1 : 3}f}<extra>client ${safe(nameOf(state.client))}</extra>`,
    });
  }
  const cut = isShare ? firstRoundsCut(groups.map((group) => group.curves[quantity])) : null;
  const ends = groups
    .map((group) => `${group.label} ends at ${group.curves[quantity].mean.at(-1).toFixed(isShare ? 1 : 3)}`)
    .join(', ');
  return {
    data,
    words: `${parts.main.words[quantity][0]} by round: ${ends}.`,
    layout: {
      height: isNarrow() ? 340 : 430,
      shapes,
      xaxis: roundAxis(every, { range: spanOf(every) }),
      yaxis: axis({ title: isShare ? 'Accuracy (%)' : 'Loss', ...(cut ? { range: cut } : {}) }),
    },
    caption: [
      explained[quantity],
      banded
        ? 'Line: mean over training seeds; band: lowest to highest seed.'
        : groups.length > 1
          ? 'One training seed each.'
          : 'One training seed.',
      ended.size ? `Dotted: end of the ${[...ended].join(' or ')}.` : '',
      cut ? 'Some of the first rounds are below the visible range; double-click to show all.' : '',
      state.client != null && table ? `Thick line: client ${nameOf(state.client)} in ${runLabel(currentRun())}.` : '',
    ]
      .filter(Boolean)
      .join(' '),
    rows: () => [
      ['method', 'round', 'mean', 'lowest', 'highest'],
      ...groups.flatMap((group) =>
        group.curves[quantity].rounds.map((round, at) => [
          group.label,
          round,
          ...['mean', 'low', 'high'].map((part) => group.curves[quantity][part][at]),
        ]),
      ),
    ],
  };
}
