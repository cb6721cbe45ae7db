// Graph of who learns from whom: the strongest ties of each client, and clusters computed from them.
function strongTies(page, most = 5) {
  const ties = new Map();
  page.forEach((row, at) => {
    const sum = known(row).reduce((total, value) => total + value, 0);
    if (!sum) return;
    const peers = Array.from(row, (value, peer) => [value / sum, peer]).filter(
      ([value, peer]) => peer !== at && value > 0,
    );
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

// Weight of peers from the own group, compared with what random peers would have.
function withinGroups(page, groups) {
  const shares = [];
  const chance = [];
  page.forEach((row, at) => {
    const peers = Array.from(row, (value, peer) => [value, peer]).filter(([value, peer]) => peer !== at && value > 0);
    const sum = peers.reduce((total, [value]) => total + value, 0);
    if (!sum) return;
    shares.push(
      peers.filter(([, peer]) => groups[peer] === groups[at]).reduce((total, [value]) => total + value, 0) / sum,
    );
    chance.push((groups.filter((group) => group === groups[at]).length - 1) / (groups.length - 1));
  });
  return ` The data was partitioned into ${new Set(groups).size} groups: ${percent(mean(shares), 0)} of the weight of a client's peers is in its own group; with random peers it would be ${percent(mean(chance), 0)}.`;
}

function drawGraph() {
  const found = relations();
  if (!found?.graph) return { empty: emptyRelations() };
  const { x, y, cluster, source } = found.graph;
  const [page, from] = pageKnown(unpack(found.matrices[source]), state.round);
  const ties = strongTies(page);
  const place = found.clients.indexOf(state.client);
  const groups = currentRun().true_groups;
  const strongest = Math.max(...ties.map((tie) => tie.share), 1e-9);
  const mine = (tie) => place < 0 || tie.a === place || tie.b === place;
  const bins = [0, 1, 2].map((bin) =>
    ties.filter((tie) => Math.min(2, Math.floor((3 * tie.share) / strongest)) === bin),
  );
  const trace = (some, width, opacity, colour) => ({
    type: 'scatter',
    mode: 'lines',
    hoverinfo: 'skip',
    showlegend: false,
    line: { color: colour, width },
    opacity,
    x: some.flatMap((tie) => [x[tie.a], x[tie.b], null]),
    y: some.flatMap((tie) => [y[tie.a], y[tie.b], null]),
  });
  const data = bins.map((some, bin) =>
    trace(
      some.filter((tie) => place < 0 || !mine(tie)),
      0.6 + 0.9 * bin,
      place < 0 ? 0.55 : 0.12,
      css('muted'),
    ),
  );
  if (place >= 0) data.push(trace(ties.filter(mine), 2.5, 0.9, css('ink')));
  const names = found.clients.map((client) => currentRun().names[client]);
  const clusters = [...new Set(cluster)].sort((a, b) => a - b);
  const near = new Set(place < 0 ? [] : ties.filter(mine).flatMap((tie) => [tie.a, tie.b]));
  for (const one of clusters) {
    const members = cluster.map((_, at) => at).filter((at) => cluster[at] === one);
    data.push({
      type: 'scatter',
      mode: names.length <= 40 ? 'markers+text' : 'markers',
      name: `cluster ${one + 1}`,
      x: members.map((at) => x[at]),
      y: members.map((at) => y[at]),
      text: members.map((at) => safe(short(names[at]))),
      textposition: 'top center',
      textfont: { size: 11, color: css('ink') },
      customdata: members.map((at) => found.clients[at]),
      marker: {
        size: names.length <= 40 ? 14 : 8,
        color: ink(hues[one % hues.length]),
        symbol: marks[one % marks.length],
        line: { color: css('card'), width: 1 },
        opacity: members.map((at) => (place < 0 || near.has(at) || at === place ? 1 : 0.2)),
      },
      hovertext: members.map(
        (at) => `client ${safe(names[at])}${groups ? `, group ${groups[found.clients[at]] + 1}` : ''}`,
      ),
      hovertemplate: '%{hovertext}<extra>%{fullData.name}</extra>',
    });
  }
  const bare = { visible: false, fixedrange: isNarrow() };
  const what = {
    counts: 'how often it has chosen them so far',
    weights: 'their weights in its model',
    selection: 'its choice in this round',
    similarity: 'similarity',
  }[matrixOf(source).kind];
  const whose = place >= 0 ? ` Thick lines: the peers of client ${nameOf(state.client)}.` : '';
  return {
    data,
    layout: { height: isNarrow() ? 360 : 470, xaxis: bare, yaxis: bare, showlegend: clusters.length <= 8 },
    words: `Graph of ${names.length} clients in ${clusters.length} clusters, with ${ties.length} ties, round ${found.rounds[from]}.`,
    caption:
      `Each point is a client, connected to its five most important peers by ${what} (thicker: more). Colours and shapes: clusters computed from these connections alone.${
        groups && ties.length
          ? `${withinGroups(
              page,
              found.clients.map((client) => groups[client]),
            )}`
          : ''
      }${whose} ${found.notes.join(' ')}`.trim(),
    rows: () => [
      ['client', 'peer', 'share', 'cluster_of_client', 'cluster_of_peer'],
      ...ties.flatMap((tie) =>
        [...tie.of].map(([at, share]) => {
          const peer = at === tie.a ? tie.b : tie.a;
          return [names[at], names[peer], share.toFixed(5), cluster[at] + 1, cluster[peer] + 1];
        }),
      ),
    ],
  };
}
