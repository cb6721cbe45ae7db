// Matrices between clients by round.
function pageKnown(stack, at) {
  // In a round without this matrix, the last one before it is shown.
  for (let place = at; place >= 0; place -= 1) {
    const page = pageOf(stack, place);
    if (page.some((row) => row.some((value) => !Number.isNaN(value)))) return [page, place];
  }
  return [pageOf(stack, at), at];
}

function drawHeat() {
  const found = relations();
  if (!found) return { empty: emptyRelations() };
  const { title, description } = matrixOf(state.matrix);
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
  const hidden = state.client != null && place < 0 ? ` Client ${nameOf(state.client)} is not among those shown.` : '';
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
    words: `Heat map: ${title}, round ${found.rounds[from]}, ${names.length} by ${names.length} clients.`,
    caption:
      `${description}${place >= 0 ? ` Frame: client ${nameOf(state.client)}.` : ''}${stale}${hidden} ${found.notes.join(' ')}`.trim(),
    rows: () => [
      ['client', ...names],
      ...page.map((row, at) => [
        names[at],
        ...Array.from(row, (value) => (Number.isNaN(value) ? '' : +value.toFixed(5))),
      ]),
    ],
  };
}
