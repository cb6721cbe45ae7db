// Curves by round, with a band over seeds, the end of methods' periods, and the selected client.
function explained(quantity) {
  const { title, higher_is_better: higher } = primary();
  if (quantity === 'loss') {
    const bad = `a ${higher ? 'low' : 'high'} ${title}`;
    return `Mean loss of local training. A low loss with ${bad} indicates overfitting.`;
  }
  if (quantity === 'worst_tenth')
    return `Mean ${title} of the tenth of the clients with the ${higher ? 'lowest' : 'highest'} ${title}.`;
  if (quantity.startsWith('trained_')) return `${capitalised(title)} right after local training, before aggregation.`;
  if (quantity === 'accuracy')
    return "Share of test samples that the clients' own models classify correctly, over all clients.";
  const metric = metricOf(quantity);
  const direction = metric.higher_is_better ? 'Higher' : 'Lower';
  return `${capitalised(metric.title)} of the clients' own models on all test samples: ${metric.description}. ${direction} is better.`;
}

// Bad values of the first rounds would compress the rest: they may be cut off.
function firstRoundsCut(curves, metric) {
  if (Math.min(...curves.map((curve) => curve.rounds.length)) < 10) return null;
  const later = (values) => values.slice(Math.max(2, Math.floor(values.length / 8)));
  const higher = metric.higher_is_better;
  const least = metric.percent ? 10 : 0;
  const lows = curves.flatMap((curve) => (higher ? later(curve.low) : curve.low));
  const highs = curves.flatMap((curve) => (higher ? curve.high : later(curve.high)));
  const [low, high] = [Math.min(...lows), Math.max(...highs)];
  const [lowest, highest] = higher ? [Math.min(low, high - least), high] : [low, Math.max(high, low + least)];
  const all = Math.max(...curves.flatMap((curve) => curve.high)) - Math.min(...curves.flatMap((curve) => curve.low));
  const margin = 0.06 * (highest - lowest);
  return highest - lowest + 2 * margin > 0.6 * all ? null : [lowest - margin, highest + margin];
}

function drawLearning() {
  const quantity = state.quantity;
  const groups = parts.main.groups.filter((group) => group.curves[quantity]);
  if (!groups.length) return { empty: 'No round has been evaluated yet.' };
  const metric = metricOf(quantity);
  const isShare = Boolean(metric?.percent);
  const format = isShare ? '.1f' : metric ? '.3~g' : '.3f';
  const text = (value) => (metric && !isShare ? significant(value) : value.toFixed(isShare ? 1 : 3));
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
      hovertemplate: `round %{x}: %{y:${format}}${isShare ? ' %' : ''}<extra>${safe(group.label)}</extra>`,
    });
  }
  const { name } = primary();
  const own = { [name]: 'score', [`trained_${name}`]: 'trained', loss: 'loss' }[quantity];
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
      hovertemplate: `round %{x}: %{y:${format}}<extra>client ${safe(nameOf(state.client))}</extra>`,
    });
  }
  const cut = metric
    ? firstRoundsCut(
        groups.map((group) => group.curves[quantity]),
        metric,
      )
    : null;
  const ends = groups
    .map((group) => `${group.label} ends at ${text(group.curves[quantity].mean.at(-1))}`)
    .join(', ');
  return {
    data,
    words: `${parts.main.words[quantity][0]} by round: ${ends}.`,
    layout: {
      height: isNarrow() ? 340 : 430,
      shapes,
      xaxis: roundAxis(every, { range: spanOf(every) }),
      yaxis: axis({ title: metric ? axisTitle(metric) : 'Loss', ...(cut ? { range: cut } : {}) }),
    },
    caption: [
      explained(quantity),
      banded
        ? 'Line: mean over training seeds; band: lowest to highest seed.'
        : groups.length > 1
          ? 'One training seed each.'
          : 'One training seed.',
      ended.size ? `Dotted: end of the ${[...ended].join(' or ')}.` : '',
      cut
        ? `Some of the first rounds are ${metric.higher_is_better ? 'below' : 'above'} the visible range; double-click to show all.`
        : '',
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
