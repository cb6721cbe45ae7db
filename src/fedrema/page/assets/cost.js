// Seconds and bytes by part.
const costParts = { train: 'training', aggregate: 'aggregation', evaluate: 'evaluation', other: 'other' };

function groupMeans(pick) {
  return parts.main.groups.map((group, at) => {
    const runs = parts.main.runs.filter((run) => run.group === at);
    const names = [...new Set(runs.flatMap((run) => Object.keys(pick(run))))];
    return {
      group,
      values: Object.fromEntries(
        names.map((name) => [name, mean(runs.map((run) => pick(run)[name]).filter((value) => value != null))]),
      ),
    };
  });
}

function stackedBars(found, words, unit, title, scale = 1) {
  const names = [...new Set(found.flatMap(({ values }) => Object.keys(values)))];
  const rows = [...found].reverse();
  const data = names.map((name, at) => ({
    type: 'bar',
    orientation: 'h',
    name: words[name] ?? name,
    y: rows.map(({ group }) => safe(group.label)),
    x: rows.map(({ values }) => (values[name] ?? 0) / scale),
    marker: {
      color: ink(hues[[0, 4, 2, 7][at % 4]]),
      pattern: { shape: ['', '/', '.', 'x'][at % 4], solidity: 0.3, fillmode: 'overlay', fgcolor: css('card') },
    },
    hovertemplate: `%{x:.3~g} ${unit}<extra>${words[name] ?? name}</extra>`,
  }));
  return {
    data,
    layout: {
      barmode: 'stack',
      height: 130 + 44 * rows.length,
      bargap: 0.35,
      xaxis: axis({ title }),
      yaxis: axis({ showgrid: false }),
      legend: { orientation: 'h', x: 0, y: 1.02, yanchor: 'bottom', traceorder: 'normal' },
    },
  };
}

function drawTime() {
  const found = groupMeans((run) => run.seconds).filter(({ values }) => Object.keys(values).length);
  if (!found.length) return { empty: 'Not available yet.' };
  return {
    ...stackedBars(found, costParts, 's', 'seconds for all rounds'),
    words: found
      .map(({ group, values }) => `${group.label}: ${secondsInWords(Object.values(values).reduce((a, b) => a + b, 0))}`)
      .join('; '),
    caption:
      'Time of a run on its machine, mean over seeds: training of all clients, aggregation on the server, evaluation of all clients, and other work.',
    rows: () => [
      ['method', 'part', 'seconds'],
      ...found.flatMap(({ group, values }) =>
        Object.entries(values).map(([name, value]) => [group.label, name, value]),
      ),
    ],
  };
}

function drawTraffic() {
  const found = groupMeans((run) => run.bytes).filter(({ values }) => Object.keys(values).length);
  if (!found.length) return { empty: 'Nothing was sent, or it was not counted.' };
  const most = Math.max(...found.map(({ values }) => Object.values(values).reduce((a, b) => a + b, 0)));
  const [scale, unit] = [
    [1e12, 'TB'],
    [1e9, 'GB'],
    [1e6, 'MB'],
    [1e3, 'kB'],
    [1, 'B'],
  ].find(([size]) => most >= size) ?? [1, 'B'];
  return {
    ...stackedBars(found, { up: 'from clients', down: 'to clients' }, unit, `${unit} for all rounds`, scale),
    words: found
      .map(({ group, values }) => `${group.label}: ${bytesInWords(Object.values(values).reduce((a, b) => a + b, 0))}`)
      .join('; '),
    caption:
      'Data sent between clients and server, over all rounds and clients, mean over seeds. Only models and statistics are sent, never samples.',
    rows: () => [
      ['method', 'direction', 'bytes'],
      ...found.flatMap(({ group, values }) =>
        Object.entries(values).map(([name, value]) => [group.label, name, value]),
      ),
    ],
  };
}
