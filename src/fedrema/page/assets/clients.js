// Clients sorted by accuracy, and the classes of their samples.
function sortedClients() {
  const final = unpack(clientsOfRun()?.final)?.values;
  if (!final) return null;
  const evaluated = Array.from(final.keys()).filter((client) => !Number.isNaN(final[client]));
  return evaluated.sort((a, b) => final[a] - final[b] || b - a);
}

const clientsHeight = (count) =>
  isNarrow() ? Math.min(640, Math.max(320, 110 + 18 * count)) : Math.min(760, Math.max(320, 110 + 20 * count));

function accuracyRange(traces) {
  const values = known(traces.filter((trace) => trace.type === 'scatter').flatMap((trace) => trace.x));
  const lowest = Math.min(...values);
  return [lowest - Math.max(2, 0.06 * (100 - lowest)), 100 + Math.max(2, 0.06 * (100 - lowest))];
}

function labelsOf() {
  const labels = clientsOfRun()?.labels;
  if (!labels) return null;
  const [train, test] = [unpack(labels.train), unpack(labels.test)];
  return {
    classes: train.shape[1],
    of: (client) => rowOf(train, client).map((count, at) => Math.round(count + rowOf(test, client)[at])),
    train,
    test,
  };
}

function drawClients() {
  const order = sortedClients();
  if (!order?.length) return { empty: 'No client has been evaluated yet.' };
  const run = currentRun();
  const final = unpack(clientsOfRun().final).values;
  const labels = labelsOf();
  const few = order.length <= 60;
  const places = order.map((_, place) => place);
  const share = labels ? 0.46 : 1;
  const data = [];
  const same = parts.main.runs
    .map((other, at) => ({ other, at }))
    .filter(
      ({ other, at }) =>
        other.data === run.data && (at === state.run || (other.group !== run.group && other.seed === run.seed)),
    );
  for (const { other, at } of same) {
    const group = parts.main.groups[other.group];
    const values = unpack(parts.clients.runs[at].final)?.values;
    if (!values) continue;
    data.push({
      type: 'scatter',
      mode: 'markers',
      name: safe(group.label),
      y: places,
      x: order.map((client) => 100 * values[client]),
      customdata: order,
      visible: at === state.run ? true : 'legendonly',
      marker: {
        size: few ? 9 : 4,
        color: ink(group.colour),
        symbol: marks[other.group % marks.length],
        opacity: state.client == null ? 1 : order.map((client) => (client === state.client ? 1 : 0.3)),
      },
      text: order.map((client) => safe(run.names[client])),
      hovertemplate: `client %{text}: %{x:.1f} %<extra>${safe(group.label)}</extra>`,
    });
  }
  const classNames = labels ? (run.class_names ?? Array.from({ length: labels.classes }, (_, at) => String(at))) : [];
  const classStep = Math.ceil(classNames.length / 20);
  const classTicks = classNames.map((_, at) => at).filter((at) => at % classStep === 0);
  if (labels) {
    data.push({
      type: 'heatmap',
      xaxis: 'x2',
      y: places,
      x: Array.from({ length: labels.classes }, (_, label) => label),
      z: order.map((client) => labels.of(client)),
      customdata: order.map((client) => Array(labels.classes).fill(client)),
      colorscale: ramp(),
      zmin: 0,
      xgap: few ? 1 : 0,
      ygap: few ? 1 : 0,
      colorbar: { title: { text: 'samples', side: 'right' }, thickness: 10, len: 0.6, outlinewidth: 0 },
      text: order.map((client) => classNames.map((name) => `client ${safe(run.names[client])}, class ${safe(name)}`)),
      hovertemplate: '%{text}: %{z} samples<extra></extra>',
    });
  }
  const place = order.indexOf(state.client);
  const step = Math.ceil(order.length / 40);
  const ticks = few ? places : places.filter((at) => at % step === 0);
  const worst = order[0];
  const best = order.at(-1);
  return {
    data,
    words: `${order.length} clients sorted by accuracy, from client ${nameOf(worst)} with ${percent(final[worst])} to client ${nameOf(best)} with ${percent(final[best])}.`,
    layout: {
      height: clientsHeight(order.length) + (same.length > 4 ? 16 * Math.ceil(same.length / 3) : 0),
      shapes: place >= 0 ? [clientBox(place)] : [],
      xaxis: axis({ title: 'Accuracy (%)', domain: [0, share], range: accuracyRange(data) }),
      ...(labels
        ? {
            xaxis2: axis({
              title: 'Class',
              domain: [share + 0.04, 1],
              tickvals: classTicks,
              ticktext: classTicks.map((at) => safe(short(classNames[at]))),
              showgrid: false,
              tickangle: classNames.some((name) => name.length > 3) ? 90 : 0,
            }),
          }
        : {}),
      yaxis: axis({
        showgrid: few,
        tickvals: ticks,
        ticktext: ticks.map((at) => safe(short(run.names[order[at]]))),
        range: [-0.7, order.length - 0.3],
        title: 'Client',
      }),
    },
    caption: `Each row is a client of ${runLabel(run)}, sorted by its mean accuracy over the last five evaluated rounds${labels ? '; on the right, its number of samples of each class' : ''}. Select a client here or above to highlight it in every figure.${same.length > 1 ? ' Click a name in the legend to show another method with the same seed.' : ''}${labels ? '' : ' The class counts of the clients are not known.'}`,
    rows: () => [
      [
        'client',
        'accuracy',
        'train_samples',
        'test_samples',
        ...classNames.map((name) => `class_${name}`),
      ],
      ...[...order]
        .reverse()
        .map((client) => [
          run.names[client],
          final[client].toFixed(5),
          run.train_counts?.[client],
          run.test_counts?.[client],
          ...(labels ? labels.of(client) : []),
        ]),
    ],
  };
}

function chooseFrom(event) {
  const point = event.points[0];
  const client = Array.isArray(point.customdata) ? point.customdata[0] : point.customdata;
  if (Number.isInteger(client)) follow(client === state.client ? null : client);
}
