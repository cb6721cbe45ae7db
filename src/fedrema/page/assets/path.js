// The primary metric of all clients by round, or of the selected client.
function drawPath() {
  const found = clientsOfRun();
  const table = unpack(found?.score);
  const metric = primary();
  const factor = factorOf(metric);
  const hover = forHover(metric, 'y');
  byId('path-heading').textContent =
    state.client == null ? 'All clients by round' : `Client ${nameOf(state.client)} by round`;
  if (!table) return { empty: 'No client has been evaluated yet.' };
  const rounds = found.rounds;
  const sorted = rounds.map((_, at) =>
    known(rowOf(table, at))
      .map((value) => factor * value)
      .sort((a, b) => a - b),
  );
  const at = rounds.map((_, place) => place).filter((place) => sorted[place].length);
  const line = (share) => at.map((place) => quantile(sorted[place], share));
  const evaluated = at.map((place) => rounds[place]);
  const colour = currentGroup().colour;
  const data = [
    {
      type: 'scatter',
      mode: 'lines',
      name: 'middle 80 % of the clients',
      x: [...evaluated, ...[...evaluated].reverse()],
      y: [...line(0.9), ...line(0.1).reverse()],
      fill: 'toself',
      fillcolor: faded(colour, 0.2),
      line: { width: 0 },
      hoverinfo: 'skip',
    },
    {
      type: 'scatter',
      mode: 'lines',
      name: 'median client',
      x: evaluated,
      y: line(0.5),
      line: { color: ink(colour), width: 2 },
      hovertemplate: `round %{x}: ${hover}<extra>median</extra>`,
    },
  ];
  let caption =
    `Line: median over clients; band: 10th to 90th percentile. A narrow band means that ${metric.name === 'accuracy' ? 'accuracies are' : `the ${metric.title} is`} similar for all clients.`;
  let absent = [];
  if (state.client != null) {
    const own = columnOf(table, state.client).map((value) => factor * value);
    const trained = unpack(found.trained);
    const presence = unpack(found.presence);
    data.push({
      type: 'scatter',
      mode: 'lines+markers',
      name: 'its model',
      x: rounds,
      y: own,
      connectgaps: true,
      line: { color: css('ink'), width: 2.2 },
      marker: { size: 4 },
      hovertemplate: `round %{x}: ${hover}<extra>its model</extra>`,
    });
    if (trained)
      data.push({
        type: 'scatter',
        mode: 'lines',
        name: 'right after local training',
        x: rounds,
        y: columnOf(trained, state.client).map((value) => factor * value),
        connectgaps: true,
        line: { color: ink('#E69F00'), width: 1.6, dash: 'dot' },
        hovertemplate: `round %{x}: ${hover}<extra>after local training</extra>`,
      });
    if (presence)
      absent = columnOf(presence, state.client)
        .map((value, place) => [Math.round(value), rounds[place]])
        .filter(([value]) => value < 2);
    if (absent.length)
      data.push({
        type: 'scatter',
        mode: 'markers',
        name: 'absent or failed',
        x: absent.map(([, round]) => round),
        y: absent.map(() => Math.min(...known(own))),
        marker: { symbol: 'x', size: 7, color: css('bad') },
        hovertemplate: 'round %{x}: absent or failed<extra></extra>',
      });
    caption = `Thick line: the model of client ${nameOf(state.client)}; dotted: right after local training, before aggregation. Band: 10th to 90th percentile of all clients.`;
  }
  if (found.note) caption += ` ${found.note}`;
  return {
    data,
    caption,
    layout: {
      height: clientsHeight(table.shape[1]),
      xaxis: roundAxis(rounds, { range: spanOf(rounds) }),
      yaxis: axis({ title: axisTitle(metric) }),
    },
    words:
      state.client == null
        ? `The median client ends at ${shown(metric, line(0.5).at(-1) / factor)}${metric.percent ? ' percent' : ''}.`
        : `Client ${nameOf(state.client)} ends at ${known(columnOf(table, state.client)).at(-1)?.toFixed(3)}${metric.percent ? ' of 1' : ''}; it was absent or failed in ${absent.length} of ${rounds.length} rounds shown.`,
    rows: () => [
      ['round', ...currentRun().names],
      ...rounds.map((round, place) => [
        round,
        ...Array.from(rowOf(table, place), (value) => (Number.isNaN(value) ? '' : value.toFixed(5))),
      ]),
    ],
  };
}
