// Peers of the selected client by round, or a quantity that the method traces for each client.
const clientTraces = () =>
  reportsOf(currentRun()).traces.filter((trace) => trace.per_client && clientsOfRun()?.traces?.[trace.name]);

function drawPeers() {
  const found = relations();
  const heading = byId('peers-heading');
  const place = found ? found.clients.indexOf(state.client) : -1;
  const source = firstOfKind(found, ['selection', 'weights', 'counts']);
  if (place >= 0 && source != null) {
    heading.textContent = `Peers of client ${nameOf(state.client)}`;
    return onePeers(found, source, place);
  }
  const trace = clientTraces().find((one) => one.name === state.trace);
  heading.textContent = `${capitalised(trace?.title ?? 'number of peers')} of each client`;
  if (trace) return traceByClient(trace);
  return source == null
    ? { empty: 'This method reports neither peers nor another quantity for each client.' }
    : peerCounts(found, source);
}

// 2: chosen in this round; 1: chosen in an earlier round, where the method no longer chooses; 0: not a peer.
function onePeers(found, source, place) {
  const names = found.clients.map((client) => currentRun().names[client]);
  const chosen = unpack(found.matrices[source]);
  const history = firstOfKind(found, ['counts']);
  const counts = history != null && history !== source ? unpack(found.matrices[history]) : null;
  const { period } = reportsOf(currentRun());
  const words = { 2: 'chosen', 1: period?.after ?? 'chosen earlier', 0: 'no peer' };
  const rows = found.rounds.map((_, at) => {
    const row = pageOf(chosen, at)[place];
    if (row.some((value) => !Number.isNaN(value)) || !counts)
      return Array.from(row, (value) => (Number.isNaN(value) ? null : value > 0 ? 2 : 0));
    return Array.from(pageOf(counts, at)[place], (value) => (Number.isNaN(value) ? null : value > 0 ? 1 : 0));
  });
  const z = names.map((_, peer) => rows.map((row) => row[peer]));
  const pale = rows.some((row) => row.includes(1))
    ? ` Pale colour: chosen in earlier rounds${period ? `, after the ${period.title}` : ''}.`
    : '';
  return {
    data: [
      {
        ...roundsByClients(found.rounds, found.clients, z),
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
          row.map((value) => [found.clients[at], safe(names[at]), words[value] ?? 'absent']),
        ),
        hovertemplate: 'round %{x}, client %{customdata[1]}: %{customdata[2]}<extra></extra>',
      },
    ],
    layout: roundsByClientsLayout(found.rounds, names, 'Peer', place, 16),
    words: `Rounds by peers of client ${nameOf(state.client)}.`,
    caption: `Strong colour: client ${nameOf(state.client)} learns from the client of the row in this round.${pale} Frame: the client itself.`,
    rows: () => [
      ['round', ...names],
      ...found.rounds.map((round, at) => [
        round,
        ...rows[at].map((value) => (value === 0 ? '' : (words[value] ?? 'absent'))),
      ]),
    ],
  };
}

function traceByClient(trace) {
  const table = unpack(clientsOfRun().traces[trace.name]);
  const order = relations()?.clients ?? currentRun().names.map((_, client) => client);
  const factor = trace.percent ? 100 : 1;
  const z = order.map((client) =>
    columnOf(table, client).map((value) => (Number.isNaN(value) ? null : factor * value)),
  );
  return quantityByClient(clientsOfRun().rounds, order, z, trace);
}

// Without such a trace: how many entries of the peers' matrix are not zero.
function peerCounts(found, source) {
  const stack = unpack(found.matrices[source]);
  const counts = found.rounds.map((_, at) =>
    pageOf(stack, at).map((row) => (known(row).length ? known(row).filter((value) => value > 0).length : null)),
  );
  const z = found.clients.map((_, place) => counts.map((row) => row[place]));
  const description = 'From how many clients each one learns, itself included.';
  return quantityByClient(found.rounds, found.clients, z, { title: 'number of peers', description });
}

function quantityByClient(rounds, order, z, { title, description, percent: isShare }) {
  const names = order.map((client) => currentRun().names[client]);
  const unit = isShare ? ' %' : '';
  const select = firstOfKind(relations(), ['selection', 'weights', 'counts'])
    ? ' Select a client to see its peers.'
    : '';
  return {
    data: [
      {
        ...roundsByClients(rounds, order, z),
        zmax: Math.max(...z.flatMap(known)),
        colorscale: ramp(),
        colorbar: { thickness: 10, len: 0.8, outlinewidth: 0, title: { text: isShare ? '%' : '', side: 'right' } },
        customdata: z.map((line, at) => line.map(() => [order[at], safe(names[at])])),
        hovertemplate: `round %{x}, client %{customdata[1]}: %{z:.4~g}${unit}<extra></extra>`,
      },
    ],
    layout: roundsByClientsLayout(rounds, names, 'Client', order.indexOf(state.client), 14),
    words: `Rounds by clients: ${title}.`,
    caption: `Each row is a client; a stronger colour means a higher ${title}. ${description}${select}${
      z.some((line) => line.includes(null)) ? ' Empty: the client was absent.' : ''
    }`,
    rows: () => [['round', ...names], ...rounds.map((round, at) => [round, ...z.map((line) => line[at])])],
  };
}

const roundsByClients = (rounds, order, z) => ({
  type: 'heatmap',
  x: rounds,
  y: order.map((_, at) => at),
  z,
  zmin: 0,
});

function roundsByClientsLayout(rounds, names, title, framed, rowHeight) {
  const step = Math.ceil(names.length / 24);
  return {
    height: Math.min(600, Math.max(260, 90 + rowHeight * names.length)),
    shapes: framed >= 0 ? [clientBox(framed)] : [],
    xaxis: roundAxis(rounds, { showgrid: false }),
    yaxis: axis({
      showgrid: false,
      autorange: 'reversed',
      tickvals: names.map((_, at) => at).filter((at) => at % step === 0),
      ticktext: names.filter((_, at) => at % step === 0).map((name) => safe(short(name))),
      title,
    }),
  };
}
