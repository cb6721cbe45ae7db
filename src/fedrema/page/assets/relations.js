// Pairs of clients: the matrices by round, and the graph of who learns from whom.
const matrixWords = {
  S: ['similarity S', 'How alike the classifiers of two clients are: both answer the same random question, and S compares the answers; 1 is the same. Similar clients lie side by side, so that groups show as light squares.'],
  G: ['dependency map G', 'How often the client of a row has chosen the client of a column. After the critical period these counts are the weights with which it takes the other\'s classifier.'],
  sets: ['chosen peers', 'Whom the client of a row has chosen in this round: light is chosen.'],
  weights: ['weights of classifiers', 'With which weight the client of a row takes the classifier of a column.'],
};

function pageKnown(stack, at) {
  // A round in which nothing of the kind was recorded shows the last one before it.
  for (let place = at; place >= 0; place -= 1) {
    const page = pageOf(stack, place);
    if (page.some((row) => row.some((value) => !Number.isNaN(value)))) return [page, place];
  }
  return [pageOf(stack, at), at];
}

function drawHeat() {
  const found = relations();
  if (!found) return { empty: emptyRelations() };
  const [label, sentence] = matrixWords[state.matrix] ?? [state.matrix, `The matrix that the method calls ${state.matrix}.`];
  const stack = unpack(found.matrices[state.matrix]);
  const [page, from] = pageKnown(stack, state.round);
  const names = found.clients.map((client) => currentRun().names[client]);
  const places = names.map((_, place) => place);
  const step = Math.ceil(names.length / (isNarrow() ? 12 : 24));
  const ticks = { tickvals: places.filter((at) => at % step === 0), ticktext: names.filter((_, at) => at % step === 0).map((name) => safe(short(name))) };
  const place = found.clients.indexOf(state.client);
  const lines = place < 0 ? [] : [
    { type: 'rect', x0: -0.5, x1: names.length - 0.5, y0: place - 0.5, y1: place + 0.5, line: { color: '#FF3B30', width: 2 } },
    { type: 'rect', y0: -0.5, y1: names.length - 0.5, x0: place - 0.5, x1: place + 0.5, line: { color: '#FF3B30', width: 1, dash: 'dot' } },
  ];
  const stale = from !== state.round ? ` Recorded in round ${found.rounds[from]}.` : '';
  const hidden = state.client != null && place < 0 ? ` Client ${nameOf(state.client)} is not among those drawn.` : '';
  return {
    data: [{
      type: 'heatmap', z: page.map((row) => Array.from(row)), x: places, y: places, colorscale: 'Viridis', zmin: 0, zmax: found.matrices[state.matrix].highest, xgap: names.length > 60 ? 0 : 0.5, ygap: names.length > 60 ? 0 : 0.5,
      colorbar: { thickness: 10, len: 0.8, outlinewidth: 0 }, customdata: page.map((_, row) => places.map((column) => [found.clients[row], safe(names[row]), safe(names[column])])),
      hovertemplate: 'client %{customdata[1]} and %{customdata[2]}: %{z:.3~g}<extra></extra>',
    }],
    layout: {
      height: isNarrow() ? 360 : 470, shapes: lines, xaxis: axis({ ...ticks, showgrid: false, title: 'Client', constrain: 'domain', tickangle: names.some((name) => String(name).length > 3) ? -60 : 0 }),
      yaxis: axis({ ...ticks, showgrid: false, autorange: 'reversed', scaleanchor: 'x', constrain: 'domain' }),
    },
    words: `Heat map of ${label} in round ${found.rounds[from]}, ${names.length} by ${names.length} clients.`,
    caption: `${sentence}${place >= 0 ? ` Framed: client ${nameOf(state.client)}.` : ''}${stale}${hidden} ${found.notes.join(' ')}`.trim(),
    rows: () => [['client', ...names], ...page.map((row, at) => [names[at], ...Array.from(row, (value) => (Number.isNaN(value) ? '' : +value.toFixed(5)))])],
  };
}

function strongTies(page, most = 5) {
  const ties = new Map();
  page.forEach((row, at) => {
    const sum = known(row).reduce((total, value) => total + value, 0);
    if (!sum) return;
    const peers = Array.from(row, (value, peer) => [value / sum, peer]).filter(([value, peer]) => peer !== at && value > 0);
    peers.sort((a, b) => b[0] - a[0]);
    for (const [value, peer] of peers.slice(0, most)) {
      const key = at < peer ? `${at} ${peer}` : `${peer} ${at}`;
      const tie = ties.get(key) ?? { a: Math.min(at, peer), b: Math.max(at, peer), share: 0, of: new Map() };
      tie.share = Math.max(tie.share, value);
      tie.of.set(at, value);
      ties.set(key, tie);
    }
  });
  return [...ties.values()];
}

// How much of what clients take from others comes from their own group, beside what chance would give.
function withinGroups(page, groups) {
  const shares = [];
  const chance = [];
  page.forEach((row, at) => {
    const peers = Array.from(row, (value, peer) => [value, peer]).filter(([value, peer]) => peer !== at && value > 0);
    const sum = peers.reduce((total, [value]) => total + value, 0);
    if (!sum) return;
    shares.push(peers.filter(([, peer]) => groups[peer] === groups[at]).reduce((total, [value]) => total + value, 0) / sum);
    chance.push((groups.filter((group) => group === groups[at]).length - 1) / (groups.length - 1));
  });
  return ` The data was dealt in ${new Set(groups).size} groups: ${percent(mean(shares), 0)} of what a client takes from others comes from its own group; by chance it would be ${percent(mean(chance), 0)}.`;
}

function drawGraph() {
  const found = relations();
  if (!found?.graph) return { empty: emptyRelations() };
  const { x, y, cluster, source } = found.graph;
  const [page, from] = pageKnown(unpack(found.matrices[source]), state.round);
  const ties = strongTies(page);
  const place = found.clients.indexOf(state.client);
  const dealt = currentRun().true_groups;
  const strongest = Math.max(...ties.map((tie) => tie.share), 1e-9);
  const mine = (tie) => place < 0 || tie.a === place || tie.b === place;
  const bins = [0, 1, 2].map((bin) => ties.filter((tie) => Math.min(2, Math.floor((3 * tie.share) / strongest)) === bin));
  const trace = (some, width, opacity, colour) => ({
    type: 'scatter', mode: 'lines', hoverinfo: 'skip', showlegend: false, line: { color: colour, width }, opacity,
    x: some.flatMap((tie) => [x[tie.a], x[tie.b], null]), y: some.flatMap((tie) => [y[tie.a], y[tie.b], null]),
  });
  const data = bins.map((some, bin) => trace(some.filter((tie) => place < 0 || !mine(tie)), 0.6 + 0.9 * bin, place < 0 ? 0.55 : 0.12, css('muted')));
  if (place >= 0) data.push(trace(ties.filter(mine), 2.5, 0.9, css('ink')));
  const names = found.clients.map((client) => currentRun().names[client]);
  const clusters = [...new Set(cluster)].sort((a, b) => a - b);
  const near = new Set(place < 0 ? [] : ties.filter(mine).flatMap((tie) => [tie.a, tie.b]));
  for (const one of clusters) {
    const members = cluster.map((_, at) => at).filter((at) => cluster[at] === one);
    data.push({
      type: 'scatter', mode: names.length <= 40 ? 'markers+text' : 'markers', name: `cluster ${one + 1}`, x: members.map((at) => x[at]), y: members.map((at) => y[at]),
      text: members.map((at) => safe(short(names[at]))), textposition: 'top center', textfont: { size: 11, color: css('ink') }, customdata: members.map((at) => found.clients[at]),
      marker: { size: names.length <= 40 ? 14 : 8, color: ink(hues[one % hues.length]), symbol: marks[one % marks.length], line: { color: css('card'), width: 1 }, opacity: members.map((at) => (place < 0 || near.has(at) || at === place ? 1 : 0.2)) },
      hovertext: members.map((at) => `client ${safe(names[at])}${dealt ? `, dealt to group ${dealt[found.clients[at]] + 1}` : ''}`), hovertemplate: '%{hovertext}<extra>%{fullData.name}</extra>',
    });
  }
  const bare = { visible: false, fixedrange: isNarrow() };
  const what = { G: 'how often one has chosen the other so far', weights: 'the weight of the other\'s classifier', S: 'how alike they are' }[source];
  const whose = place >= 0 ? ` Heavy lines: the ties of client ${nameOf(state.client)}.` : '';
  return {
    data, layout: { height: isNarrow() ? 360 : 470, xaxis: bare, yaxis: bare, showlegend: clusters.length <= 8 },
    words: `Graph of ${names.length} clients in ${clusters.length} clusters, with ${ties.length} ties, round ${found.rounds[from]}.`,
    caption: `Each dot is a client; a line joins it to each of the five it depends on most (thicker: more), by ${what}. Colour and shape: clusters that the lines suggest, found without looking at the data.${dealt && ties.length ? `${withinGroups(page, found.clients.map((client) => dealt[client]))}` : ''}${whose} ${found.notes.join(' ')}`.trim(),
    rows: () => [['client', 'peer', 'share', 'cluster_of_client', 'cluster_of_peer'], ...ties.flatMap((tie) => [...tie.of].map(([at, share]) => { const peer = at === tie.a ? tie.b : tie.a; return [names[at], names[peer], share.toFixed(5), cluster[at] + 1, cluster[peer] + 1]; }))],
  };
}
