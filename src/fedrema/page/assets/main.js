// Controls, and what each of them redraws.
const controls = {
  'choose-run': (value) => {
    state.run = Number(value);
    keepChoice();
    refresh();
  },
  'choose-client': (value) => follow(value === '' ? null : Number(value)),
  'choose-quantity': (value) => {
    state.quantity = value;
    redraw('learning');
  },
  'choose-difference': (value) => {
    state.difference = value;
    redraw('differences');
  },
  'choose-verdict': (value) => {
    state.verdict = value;
    redraw('gains');
  },
  'choose-matrix': (value) => {
    state.matrix = value;
    redraw('heat');
  },
  'choose-trace': (value) => {
    state.trace = value;
    redraw('peers');
  },
};

function follow(client) {
  state.client = client;
  showChoices();
  redraw('learning', 'clients', 'path', 'heat', 'graph', 'peers');
  announce(client == null ? 'No client is highlighted.' : `Client ${nameOf(client)} is highlighted in every figure.`);
}

// Resets choices that the selected run does not have.
function keepChoice() {
  if (!parts.main.words[state.quantity]) state.quantity = primary().name;
  if (!metricOf(state.difference ?? '')) state.difference = honest();
  const traces = clientTraces();
  if (!traces.some((trace) => trace.name === state.trace)) state.trace = traces[0]?.name ?? null;
  if (state.client != null && state.client >= currentRun().names.length) state.client = null;
  const found = relations();
  if (!found) {
    state.round = null;
    state.matrix = null;
    return;
  }
  if (state.round == null || state.round >= found.rounds.length) state.round = found.rounds.length - 1;
  if (!found.matrices[state.matrix])
    state.matrix = firstOfKind(found, ['similarity', 'counts', 'weights', 'selection']) ?? Object.keys(found.matrices)[0];
}

// The title of a quantity as it is written within a sentence.
function asOption(name) {
  const title = parts.main.words[name][0];
  const metric = metricOf(name);
  return metric ? `${metric.title}${title.slice(metric.title.length)}` : title.toLowerCase();
}

function showChoices() {
  const main = parts.main;
  options(
    byId('choose-run'),
    main.runs.map((run, at) => [String(at), runLabel(run)]),
    String(state.run),
  );
  options(
    byId('choose-client'),
    [['', 'all'], ...currentRun().names.map((name, at) => [String(at), name])],
    state.client == null ? '' : String(state.client),
  );
  byId('clear-client').hidden = state.client == null;
  const quantities = Object.keys(main.words).filter((name) => main.groups.some((group) => group.curves[name]));
  options(
    byId('choose-quantity'),
    quantities.map((name) => [name, asOption(name)]),
    state.quantity,
  );
  options(
    byId('choose-difference'),
    scoreColumns().map(([name, , words]) => [name, words]),
    state.difference,
  );
  const traces = clientTraces();
  byId('choose-trace').parentElement.hidden = traces.length < 2;
  options(
    byId('choose-trace'),
    traces.map((trace) => [trace.name, trace.title]),
    state.trace,
  );
  const found = relations();
  byId('round-bar').hidden = !found || found.rounds.length < 2;
  byId('choose-matrix').parentElement.hidden = !found;
  if (found) {
    const slider = byId('choose-round');
    slider.max = String(found.rounds.length - 1);
    slider.value = String(state.round);
    const words = `${found.rounds[state.round]} of ${currentRun().status.rounds}`;
    slider.setAttribute('aria-valuetext', `round ${words}`);
    byId('round-shown').textContent = words;
    options(
      byId('choose-matrix'),
      Object.keys(found.matrices).map((name) => [name, matrixOf(name).title]),
      state.matrix,
    );
  }
}

function refresh() {
  const main = parts.main;
  byId('waiting').hidden = main.runs.length > 0;
  for (const section of document.querySelectorAll('main > section, body > .bar'))
    section.hidden = main.runs.length === 0;
  byId('made').textContent =
    `fedrema ${main.version} · ${main.live ? 'updated' : 'written'} ${new Date(main.made).toLocaleString()}`;
  if (!main.runs.length) return;
  if (state.run >= main.runs.length) state.run = 0;
  keepChoice();
  const seeds = new Set(main.runs.map((run) => run.seed)).size;
  byId('subtitle').textContent =
    `${main.title} · ${plural(main.groups.length, 'method')} · ${plural(seeds, 'seed')} · ${plural(currentRun().status.rounds, 'round')}`;
  document.title = `fedrema: ${main.groups
    .map((group) => group.label)
    .slice(0, 4)
    .join(', ')}`;
  byId('notes').hidden = !main.notes.length;
  byId('notes').replaceChildren(...main.notes.map((note) => make('li', {}, note)));
  drawCards();
  performance.mark('numbers');
  drawProgress();
  showChoices();
  redraw();
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  byId('theme').setAttribute('aria-pressed', String(theme === 'dark'));
}

// The run with the most emphasised method among those that show who learns from whom; otherwise one of the best group.
function firstRun() {
  const { groups, runs } = parts.main;
  const kind = (run, at) => {
    const source = parts.relations?.runs[at]?.graph?.source;
    return reportsOf(run).matrices.find((matrix) => matrix.name === source)?.kind ?? 'similarity';
  };
  const peers = runs.filter((run, at) => kind(run, at) !== 'similarity');
  peers.sort((a, b) => groups[b.group].emphasis - groups[a.group].emphasis);
  const best = leader();
  return Math.max(0, runs.indexOf(peers[0] ?? runs.find((run) => groups[run.group] === best)));
}

function begin() {
  setTheme(window.matchMedia('(prefers-color-scheme: dark)').matches ? 'dark' : 'light');
  readParts();
  if (parts.main.runs.length) state.run = firstRun();
  for (const [id, draw] of [
    ['comparison', drawComparison],
    ['differences', drawDifferences],
    ['verdict', drawVerdict],
    ['gains', drawGains],
    ['learning', drawLearning],
    ['clients', drawClients],
    ['path', drawPath],
    ['heat', drawHeat],
    ['graph', drawGraph],
    ['peers', drawPeers],
    ['traces', drawTraces],
    ['time', drawTime],
    ['traffic', drawTraffic],
    ['settings', drawSettings],
  ])
    addFigure(id, draw);
  for (const id of ['clients', 'heat', 'graph', 'peers']) figures.get(id).clicked = chooseFrom;
  for (const [id, change] of Object.entries(controls))
    byId(id).addEventListener('change', (event) => change(event.target.value));
  byId('clear-client').addEventListener('click', () => follow(null));
  byId('choose-round').addEventListener('input', (event) => {
    state.round = Number(event.target.value);
    showChoices();
    redraw('heat', 'graph');
  });
  byId('theme').addEventListener('click', () => {
    setTheme(isDark() ? 'light' : 'dark');
    refresh();
  });
  byId('all-settings').addEventListener('toggle', () => redraw('settings'));
  let width = window.innerWidth;
  window.addEventListener('resize', () => {
    if (width < 640 !== isNarrow()) redraw();
    width = window.innerWidth;
  });
  refresh();
  const afterPaint = () =>
    requestAnimationFrame(() =>
      setTimeout(() => {
        loadPlotly();
        if (parts.main.live) goLive();
      }, 0),
    );
  if (document.readyState === 'loading') document.addEventListener('DOMContentLoaded', afterPaint);
  else afterPaint();
}

begin();
