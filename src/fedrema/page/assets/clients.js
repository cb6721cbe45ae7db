// Clients sorted by the primary metric, and the classes or numbers of their samples.
function sortedClients() {
  const final = unpack(clientsOfRun()?.final)?.values;
  if (!final) return null;
  const evaluated = Array.from(final.keys()).filter((client) => !Number.isNaN(final[client]));
  return evaluated.sort((a, b) => signOf(primary()) * (final[a] - final[b]) || b - a);
}

const clientsHeight = (count) =>
  isNarrow() ? Math.min(640, Math.max(320, 110 + 18 * count)) : Math.min(760, Math.max(320, 110 + 20 * count));

function scoreRange(traces) {
  if (!primary().percent) return null;
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

// Bars of training and test samples, for tasks without classes.
function countsOf(run, order) {
  const bars = [
    ['training samples', run.train_counts, '#0072B2', ''],
    ['test samples', run.test_counts, '#E69F00', '/'],
  ];
  return bars
    .filter(([, counts]) => counts)
    .map(([name, counts, colour, shape]) => ({
      type: 'bar',
      orientation: 'h',
      xaxis: 'x2',
      name,
      y: order.map((_, place) => place),
      x: order.map((client) => counts[client]),
      customdata: order,
      text: order.map((client) => safe(run.names[client])),
      textposition: 'none',
      marker: { color: faded(colour, 0.75), pattern: { shape, solidity: 0.3, fillmode: 'overlay', fgcolor: css('card') } },
      hovertemplate: `client %{text}: %{x} ${name}<extra></extra>`,
    }));
}

function drawClients() {
  const order = sortedClients();
  if (!order?.length) return { empty: 'No client has been evaluated yet.' };
  const run = currentRun();
  const final = unpack(clientsOfRun().final).values;
  const metric = primary();
  const labels = labelsOf();
  const counts = !run.outcome && run.train_counts ? countsOf(run, order) : [];
  const few = order.length <= 60;
  const places = order.map((_, place) => place);
  const share = labels || counts.length ? 0.46 : 1;
  const held = run.outcome ? { class: 'classes' }[run.outcome] ?? `${run.outcome}s` : 'samples';
  byId('clients-heading').textContent = `${capitalised(metric.title)} and ${held} of each client`;
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
      x: order.map((client) => factorOf(metric) * values[client]),
      customdata: order,
      visible: at === state.run ? true : 'legendonly',
      marker: {
        size: few ? 9 : 4,
        color: ink(group.colour),
        symbol: marks[other.group % marks.length],
        opacity: state.client == null ? 1 : order.map((client) => (client === state.client ? 1 : 0.3)),
      },
      text: order.map((client) => safe(run.names[client])),
      hovertemplate: `client %{text}: ${forHover(metric, 'x')}<extra>${safe(group.label)}</extra>`,
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
      text: order.map((client) => classNames.map((name) => `client ${safe(run.names[client])}, ${run.outcome} ${safe(name)}`)),
      hovertemplate: '%{text}: %{z} samples<extra></extra>',
    });
  }
  data.push(...counts);
  const place = order.indexOf(state.client);
  const step = Math.ceil(order.length / 40);
  const ticks = few ? places : places.filter((at) => at % step === 0);
  const worst = order[0];
  const best = order.at(-1);
  return {
    data,
    words: `${order.length} clients sorted by ${metric.title}, from client ${nameOf(worst)} with ${withUnit(metric, final[worst])} to client ${nameOf(best)} with ${withUnit(metric, final[best])}.`,
    layout: {
      height: clientsHeight(order.length) + (same.length > 4 ? 16 * Math.ceil(same.length / 3) : 0),
      shapes: place >= 0 ? [clientBox(place)] : [],
      xaxis: axis({ title: axisTitle(metric), domain: [0, share], ...(scoreRange(data) ? { range: scoreRange(data) } : {}) }),
      ...(counts.length
        ? { barmode: 'stack', xaxis2: axis({ title: 'Samples', domain: [share + 0.04, 1] }) }
        : {}),
      ...(labels
        ? {
            xaxis2: axis({
              title: capitalised(run.outcome),
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
    caption: `Each row is a client of ${runLabel(run)}, sorted by its mean ${metric.title} over the last five evaluated rounds${metric.higher_is_better ? '' : ', the lowest on top'}${labels ? `; on the right, its number of samples ${run.outcome === 'label' ? 'with' : 'of'} each ${run.outcome}` : counts.length ? '; on the right, its numbers of training and test samples' : ''}. Select a client here or above to highlight it in every figure.${same.length > 1 ? ' Click a name in the legend to show another method with the same seed.' : ''}${labels || counts.length ? '' : ` The ${run.outcome ?? 'sample'} counts of the clients are not known.`}`,
    rows: () => [
      [
        'client',
        metric.name,
        'train_samples',
        'test_samples',
        ...classNames.map((name) => `${run.outcome}_${name}`),
      ],
      ...[...order]
        .reverse()
        .map((client) => [
          run.names[client],
          metric.percent ? final[client].toFixed(5) : final[client].toPrecision(6),
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
