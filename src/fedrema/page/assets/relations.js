// Pairs of clients: the matrices by round.
const matrixWords = {
  S: [
    'similarity S',
    'How alike the classifiers of two clients are: both answer the same random question, and S compares the answers; 1 is the same. Similar clients lie side by side, so that groups show as light squares.',
  ],
  G: [
    'dependency map G',
    "How often the client of a row has chosen the client of a column. After the critical period these counts are the weights with which it takes the other's classifier.",
  ],
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
  const [label, sentence] = matrixWords[state.matrix] ?? [
    state.matrix,
    `The matrix that the method calls ${state.matrix}.`,
  ];
  const stack = unpack(found.matrices[state.matrix]);
  const [page, from] = pageKnown(stack, state.round);
  const names = found.clients.map((client) => currentRun().names[client]);
  const places = names.map((_, place) => place);
  const step = Math.ceil(names.length / (isNarrow() ? 12 : 24));
  const ticks = {
    tickvals: places.filter((at) => at % step === 0),
    ticktext: names.filter((_, at) => at % step === 0).map((name) => safe(short(name))),
  };
  const place = found.clients.indexOf(state.client);
  const lines =
    place < 0
      ? []
      : [
          {
            type: 'rect',
            x0: -0.5,
            x1: names.length - 0.5,
            y0: place - 0.5,
            y1: place + 0.5,
            line: { color: '#FF3B30', width: 2 },
          },
          {
            type: 'rect',
            y0: -0.5,
            y1: names.length - 0.5,
            x0: place - 0.5,
            x1: place + 0.5,
            line: { color: '#FF3B30', width: 1, dash: 'dot' },
          },
        ];
  const stale = from !== state.round ? ` Recorded in round ${found.rounds[from]}.` : '';
  const hidden = state.client != null && place < 0 ? ` Client ${nameOf(state.client)} is not among those drawn.` : '';
  return {
    data: [
      {
        type: 'heatmap',
        z: page.map((row) => Array.from(row)),
        x: places,
        y: places,
        colorscale: 'Viridis',
        zmin: 0,
        zmax: found.matrices[state.matrix].highest,
        xgap: names.length > 60 ? 0 : 0.5,
        ygap: names.length > 60 ? 0 : 0.5,
        colorbar: { thickness: 10, len: 0.8, outlinewidth: 0 },
        customdata: page.map((_, row) =>
          places.map((column) => [found.clients[row], safe(names[row]), safe(names[column])]),
        ),
        hovertemplate: 'client %{customdata[1]} and %{customdata[2]}: %{z:.3~g}<extra></extra>',
      },
    ],
    layout: {
      height: isNarrow() ? 360 : 470,
      shapes: lines,
      xaxis: axis({
        ...ticks,
        showgrid: false,
        title: 'Client',
        constrain: 'domain',
        tickangle: names.some((name) => String(name).length > 3) ? -60 : 0,
      }),
      yaxis: axis({ ...ticks, showgrid: false, autorange: 'reversed', scaleanchor: 'x', constrain: 'domain' }),
    },
    words: `Heat map of ${label} in round ${found.rounds[from]}, ${names.length} by ${names.length} clients.`,
    caption:
      `${sentence}${place >= 0 ? ` Framed: client ${nameOf(state.client)}.` : ''}${stale}${hidden} ${found.notes.join(' ')}`.trim(),
    rows: () => [
      ['client', ...names],
      ...page.map((row, at) => [
        names[at],
        ...Array.from(row, (value) => (Number.isNaN(value) ? '' : +value.toFixed(5))),
      ]),
    ],
  };
}
