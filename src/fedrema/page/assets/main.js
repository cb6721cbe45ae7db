// Puts everything together: choices, their consequences, light and dark.
const steering = {
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
  'choose-matrix': (value) => {
    state.matrix = value;
    redraw('heat');
  },
};

function follow(client) {
  state.client = client;
  showChoices();
  redraw('learning', 'clients', 'path', 'heat', 'graph', 'sets');
  say(client == null ? 'All clients are shown.' : `Every picture now follows client ${nameOf(client)}.`);
}

// A choice that the other run does not have is given up.
function keepChoice() {
  if (state.client != null && state.client >= currentRun().names.length) state.client = null;
  const found = relations();
  if (!found) {
    state.round = null;
    state.matrix = null;
    return;
  }
  if (state.round == null || state.round >= found.rounds.length) state.round = found.rounds.length - 1;
  if (!found.matrices[state.matrix]) state.matrix = found.matrices.S ? 'S' : Object.keys(found.matrices)[0];
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
    quantities.map((name) => [name, main.words[name][0].toLowerCase()]),
    state.quantity,
  );
  options(
    byId('choose-difference'),
    columns.filter(([, , words]) => words).map(([name, , words]) => [name, words]),
    state.difference,
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
      Object.keys(found.matrices).map((name) => [name, matrixWords[name]?.[0] ?? name]),
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
    `fedrema ${main.version} · ${main.live ? 'as of' : 'made'} ${new Date(main.made).toLocaleString()}`;
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

function wear(theme) {
  document.documentElement.dataset.theme = theme;
  byId('theme').setAttribute('aria-pressed', String(theme === 'dark'));
}

function begin() {
  wear(window.matchMedia('(prefers-color-scheme: dark)').matches ? 'dark' : 'light');
  readParts();
  const first = parts.main.runs.findIndex((run, at) => parts.relations?.runs[at]?.graph?.source === 'G');
  const best = leader();
  state.run = Math.max(
    0,
    first >= 0 ? first : parts.main.runs.findIndex((run) => parts.main.groups[run.group] === best),
  );
  for (const [id, draw] of [
    ['comparison', drawComparison],
    ['differences', drawDifferences],
    ['learning', drawLearning],
    ['clients', drawClients],
    ['path', drawPath],
    ['heat', drawHeat],
    ['graph', drawGraph],
    ['sets', drawSets],
    ['period', drawPeriod],
    ['time', drawTime],
    ['traffic', drawTraffic],
    ['settings', drawSettings],
  ])
    picture(id, draw);
  for (const id of ['clients', 'heat', 'graph', 'sets']) pictures.get(id).clicked = chooseFrom;
  for (const [id, change] of Object.entries(steering))
    byId(id).addEventListener('change', (event) => change(event.target.value));
  byId('clear-client').addEventListener('click', () => follow(null));
  byId('choose-round').addEventListener('input', (event) => {
    state.round = Number(event.target.value);
    showChoices();
    redraw('heat', 'graph');
  });
  byId('theme').addEventListener('click', () => {
    wear(isDark() ? 'light' : 'dark');
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
        wakePlotly();
        if (parts.main.live) goLive();
      }, 0),
    );
  if (document.readyState === 'loading') document.addEventListener('DOMContentLoaded', afterPaint);
  else afterPaint();
}

begin();
