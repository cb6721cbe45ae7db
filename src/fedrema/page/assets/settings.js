// Settings and versions, one column per group.
function drawSettings() {
  const firsts = parts.main.groups.map((_, at) => parts.main.runs.find((run) => run.group === at));
  const text = (value) =>
    value == null
      ? '–'
      : value === true
        ? 'yes'
        : value === false
          ? 'no'
          : typeof value === 'object'
            ? Object.entries(value)
                .map((pair) => pair.join(' '))
                .join(', ')
            : String(value);
  // Shortened for a column; config.json has the full values.
  const brief = { commit: (value) => value?.slice(0, 10), started: (value) => value?.slice(0, 16).replace('T', ' ') };
  const versions = (run) => ({
    ...Object.fromEntries(
      Object.entries(run.ran_on)
        .filter(([name]) => name !== 'versions')
        .map(([name, value]) => [name, brief[name]?.(value) ?? value]),
    ),
    ...run.ran_on.versions,
  });
  const of = (pick, kind) =>
    [...new Set(firsts.flatMap((run) => Object.keys(pick(run))))]
      .filter((name) => kind !== 'setting' || name !== 'seed')
      .map((name) => ({ kind, name, values: firsts.map((run) => text(pick(run)[name])) }));
  const seeds = {
    kind: 'setting',
    name: 'seeds run',
    values: parts.main.groups.map((_, at) =>
      parts.main.runs
        .filter((run) => run.group === at)
        .map((run) => run.seed)
        .join(', '),
    ),
  };
  const rows = [
    seeds,
    ...of((run) => run.holds, 'data'),
    ...of((run) => run.settings, 'setting'),
    ...of(versions, 'version'),
  ];
  for (const row of rows)
    row.differs =
      row.kind === 'setting' && row !== seeds && new Set(row.values.filter((value) => value !== '–')).size > 1;
  const main = new Set([
    'dataset',
    'federation',
    'number of clients',
    'training samples',
    'privacy budget ε',
    'simulated attackers',
    'rounds',
    'lr',
    'epochs',
    'batch',
    'net',
    'device',
    'fedrema',
    'torch',
    'started',
    'commit',
    'seeds run',
  ]);
  rows.sort((a, b) => Number(b.differs) - Number(a.differs) || Number(main.has(b.name)) - Number(main.has(a.name)));
  const head = make(
    'tr',
    {},
    make('th', { scope: 'col' }, 'setting'),
    ...parts.main.groups.map((group) => make('th', { scope: 'col' }, group.label)),
  );
  const body = rows.map((row) =>
    make(
      'tr',
      { class: row.differs ? 'differs' : null },
      make('th', { scope: 'row' }, row.kind === 'setting' && row !== seeds ? `--${row.name}` : row.name),
      ...row.values.map((value) => make('td', {}, value)),
    ),
  );
  const table = make('table', {}, make('thead', {}, head), make('tbody', {}, ...body));
  const scroll = byId('settings').querySelector('.scroll');
  const all = byId('settings').querySelector('details');
  // Most settings are hidden at first; the choice is kept when new rounds arrive.
  const lasting = rows.filter((row) => row.differs || main.has(row.name)).length;
  body.forEach((line, at) => {
    line.hidden = !all.open && at >= lasting;
  });
  all.querySelector('summary').textContent = all.open ? 'Show fewer' : `Show all ${rows.length}`;
  scroll.replaceChildren(table);
  return {
    rows: () => [
      ['setting', ...parts.main.groups.map((group) => group.label)],
      ...rows.map((row) => [row.name, ...row.values]),
    ],
  };
}
