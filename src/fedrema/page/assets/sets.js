// Who was in whose set, round by round.
function drawSets() {
  const found = relations();
  const heading = byId('sets-heading');
  const place = found ? found.clients.indexOf(state.client) : -1;
  if (place >= 0 && (found.matrices.sets || found.matrices.weights)) {
    heading.textContent = `Whom client ${nameOf(state.client)} learns from`;
    return oneClientsPeers(found, place);
  }
  heading.textContent = 'How many peers each client learns from';
  return peerCounts(found);
}

function oneClientsPeers(found, place) {
  const names = found.clients.map((client) => currentRun().names[client]);
  const sets = unpack(found.matrices.sets ?? found.matrices.weights);
  const counts = unpack(found.matrices.G);
  const rows = found.rounds.map((_, at) => {
    const row = pageOf(sets, at)[place];
    if (row.some((value) => !Number.isNaN(value)) || !counts)
      return Array.from(row, (value) => (Number.isNaN(value) ? null : value > 0 ? 2 : 0));
    return Array.from(pageOf(counts, at)[place], (value) => (Number.isNaN(value) ? null : value > 0 ? 1 : 0));
  });
  const z = names.map((_, peer) => rows.map((row) => row[peer]));
  const places = names.map((_, at) => at);
  const step = Math.ceil(names.length / 24);
  return {
    data: [
      {
        type: 'heatmap',
        x: found.rounds,
        y: places,
        z,
        zmin: 0,
        zmax: 2,
        showscale: false,
        ygap: names.length > 60 ? 0 : 1,
        xgap: found.rounds.length > 80 ? 0 : 1,
        colorscale: [
          [0, css('low')],
          [0.5, isDark() ? '#4f7f9f' : '#9cc3de'],
          [1, css('high')],
        ],
        customdata: z.map((row, at) =>
          row.map((value) => [
            found.clients[at],
            safe(names[at]),
            value === 2 ? 'chosen' : value === 1 ? 'by history' : value === 0 ? 'no' : 'absent',
          ]),
        ),
        hovertemplate: 'round %{x}, client %{customdata[1]}: %{customdata[2]}<extra></extra>',
      },
    ],
    layout: {
      height: Math.min(640, Math.max(260, 90 + 16 * names.length)),
      shapes: [clientBox(place)],
      xaxis: roundAxis(found.rounds, { showgrid: false }),
      yaxis: axis({
        showgrid: false,
        autorange: 'reversed',
        tickvals: places.filter((at) => at % step === 0),
        ticktext: names.filter((_, at) => at % step === 0).map((name) => safe(short(name))),
        title: 'Peer',
      }),
    },
    words: `Rounds by peers: whom client ${nameOf(state.client)} learns from.`,
    caption: `Strong colour: in this round client ${nameOf(state.client)} chose the client of that row. Paler: after the critical period it takes the classifiers of those that it had chosen before. Framed: the client itself.`,
    rows: () => [
      ['round', ...names],
      ...found.rounds.map((round, at) => [
        round,
        ...rows[at].map((value) => ({ 2: 'chosen', 1: 'by history', 0: '' })[value] ?? 'absent'),
      ]),
    ],
  };
}

function peerCounts(found) {
  const table = unpack(people()?.chosen);
  if (!table) return { empty: 'This method does not choose peers: every client gets the same, or nothing.' };
  const rounds = people().rounds;
  const order = found ? found.clients : currentRun().names.map((_, client) => client);
  const names = order.map((client) => currentRun().names[client]);
  const places = names.map((_, at) => at);
  const step = Math.ceil(names.length / 24);
  const z = order.map((client) => columnOf(table, client).map((value) => (Number.isNaN(value) ? null : value)));
  const row = order.indexOf(state.client);
  return {
    data: [
      {
        type: 'heatmap',
        x: rounds,
        y: places,
        z,
        zmin: 0,
        colorscale: ramp(),
        colorbar: { thickness: 10, len: 0.8, outlinewidth: 0, title: { text: 'clients', side: 'right' } },
        customdata: z.map((line, at) => line.map(() => [order[at], safe(names[at])])),
        hovertemplate: 'round %{x}, client %{customdata[1]}: learns from %{z}<extra></extra>',
      },
    ],
    layout: {
      height: Math.min(560, Math.max(260, 90 + 14 * names.length)),
      shapes: row >= 0 ? [clientBox(row)] : [],
      xaxis: roundAxis(rounds, { showgrid: false }),
      yaxis: axis({
        showgrid: false,
        autorange: 'reversed',
        tickvals: places.filter((at) => at % step === 0),
        ticktext: names.filter((_, at) => at % step === 0).map((name) => safe(short(name))),
        title: 'Client',
      }),
    },
    words: `Rounds by clients: from how many clients each one learns.`,
    caption:
      "Each row is a client; the stronger the colour, the more clients it learns from, itself included. Methods that search in every round choose anew each time; once FedReMa's critical period is over, a client keeps everyone it has ever chosen, weighted by how often. Choose a client to see who they are." +
      (z.some((line) => line.includes(null)) ? ' Empty: the client was absent.' : ''),
    rows: () => [['round', ...names], ...rounds.map((round, at) => [round, ...z.map((line) => line[at])])],
  };
}
