// Curves by round, a band over seeds, the end of the critical period, and the client that is followed.
const explained = {
  accuracy: "Share of test samples that each client's own model gets right, over all clients.",
  worst_tenth: 'Accuracy of the tenth of the clients that is served worst: is anybody left behind?',
  trained_accuracy:
    'Accuracy right after local training, before the server mixes the models: how good training alone is.',
  loss: 'What local training makes smaller. A low loss with a low accuracy means learning by heart.',
};

// Low first rounds would squeeze all that follows: they may run out of the frame.
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
  if (!groups.length) return { empty: 'No round has been scored yet.' };
  const isShare = quantity !== 'loss';
  const every = groups.flatMap((group) => group.curves[quantity].rounds);
  const data = [];
  const shapes = [];
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
    if (curve.critical_end != null) {
      shapes.push({
        type: 'line',
        x0: curve.critical_end,
        x1: curve.critical_end,
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
  const table = unpack(people()?.[own]);
  if (state.client != null && table) {
    data.push({
      type: 'scatter',
      mode: 'lines+markers',
      name: `client ${safe(nameOf(state.client))}`,
      x: people().rounds,
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
      shapes.length ? 'Dotted: the critical period ends, and with it the search for the most relevant peers.' : '',
      cut ? 'Some of the first rounds lie below the frame; a double click shows all.' : '',
      state.client != null && table ? `Heavy line: client ${nameOf(state.client)} in ${runLabel(currentRun())}.` : '',
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
