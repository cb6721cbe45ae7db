// Figures: each has a function that returns its data and layout; visible figures are drawn first.
const figures = new Map();
// Distinguishable with colour blindness; black and white are swapped on a dark background.
const hues = ['#0072B2', '#D55E00', '#009E73', '#CC79A7', '#E69F00', '#56B4E9', '#8C6BB1', '#7F7F7F'];
const marks = ['circle', 'square', 'diamond', 'triangle-up', 'cross', 'star', 'pentagon', 'hexagram'];
const isDark = () => document.documentElement.dataset.theme === 'dark';
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const isNarrow = () => window.innerWidth < 640;

function ink(colour) {
  if (isDark() && colour === '#000000') return '#FFFFFF';
  if (isDark() && colour === '#0072B2') return '#4DA3DC';
  return colour;
}
function faded(colour, strength) {
  const number = parseInt(ink(colour).slice(1), 16);
  return `rgba(${number >> 16},${(number >> 8) & 255},${number & 255},${strength})`;
}
const ramp = () => [
  [0, css('low')],
  [1, css('high')],
];

function axis(more = {}) {
  return {
    gridcolor: css('line'),
    linecolor: css('line'),
    zerolinecolor: css('line'),
    tickcolor: css('line'),
    automargin: true,
    zeroline: false,
    fixedrange: isNarrow(),
    ...more,
    title: { text: more.title ?? '', standoff: 8 },
  };
}

// From the first round to the last, without the margin that Plotly adds for markers.
function spanOf(rounds) {
  const [first, last] = [Math.min(...rounds), Math.max(...rounds)];
  return last > first ? [first, last] : [first - 0.5, last + 0.5];
}

const roundAxis = (rounds, more = {}) =>
  axis({
    title: 'Communication round',
    ...(Math.max(...rounds) - Math.min(...rounds) < 12 ? { dtick: 1 } : {}),
    ...more,
  });

function withDefaults(layout) {
  return {
    paper_bgcolor: css('card'),
    plot_bgcolor: css('card'),
    height: 380,
    hovermode: 'closest',
    uirevision: `${state.run} ${state.quantity}`,
    margin: { l: 8, r: 8, t: 8, b: 8 },
    dragmode: isNarrow() ? false : 'zoom',
    font: { color: css('ink'), size: isNarrow() ? 11 : 12.5, family: getComputedStyle(document.body).fontFamily },
    legend: { orientation: 'h', x: 0, y: 1.02, yanchor: 'bottom', xanchor: 'left' },
    hoverlabel: { bgcolor: css('card'), bordercolor: css('line'), font: { color: css('ink') } },
    ...layout,
  };
}

function addFigure(id, draw) {
  const figure = byId(id);
  const entry = { id, figure, draw, plot: figure.querySelector('.plot'), rows: null, stale: true, seen: false };
  const exports = make('div', { class: 'exports' });
  const kinds = entry.plot ? ['PNG', 'SVG', 'CSV'] : ['CSV'];
  for (const kind of kinds) {
    const button = make('button', { type: 'button', 'aria-label': `Save ${figure.dataset.title} as ${kind}` }, kind);
    button.addEventListener('click', () => exportAs(entry, kind));
    exports.append(button);
  }
  figure.querySelector('.head').append(exports);
  entry.exports = exports;
  figures.set(id, entry);
}

function exportAs(entry, kind) {
  const name = `fedrema-${entry.id}`;
  if (kind === 'CSV') {
    save(`${name}.csv`, asCsv(entry.rows()), 'text/csv');
    return;
  }
  const { width, height } = entry.plot.getBoundingClientRect();
  Plotly.downloadImage(entry.plot, {
    format: kind.toLowerCase(),
    filename: name,
    width,
    height,
    scale: kind === 'PNG' ? 2 : 1,
  });
}

function render(entry) {
  entry.stale = false;
  const drawn = entry.draw() ?? { empty: 'No data.' };
  entry.rows = drawn.rows ?? null;
  entry.figure.hidden = Boolean(drawn.hidden);
  entry.exports.hidden = !drawn.rows;
  const caption = entry.figure.querySelector('figcaption');
  if (drawn.caption != null) caption.textContent = drawn.caption;
  if (!entry.plot || drawn.hidden) return;
  if (drawn.empty) {
    if (entry.seen) Plotly.purge(entry.plot);
    entry.seen = false;
    entry.plot.removeAttribute('role');
    entry.plot.removeAttribute('aria-label');
    entry.plot.classList.add('empty');
    entry.plot.textContent = drawn.empty;
    return;
  }
  if (!entry.seen) {
    entry.plot.textContent = '';
    entry.plot.classList.remove('empty');
  }
  entry.plot.setAttribute('role', 'img');
  entry.plot.setAttribute('aria-label', drawn.words ?? caption.textContent);
  Plotly.react(entry.plot, drawn.data, withDefaults(drawn.layout ?? {}), { displayModeBar: false, responsive: true });
  if (!entry.seen && entry.clicked) entry.plot.on('plotly_click', entry.clicked);
  entry.seen = true;
  performance.mark('figure');
}

// Visible figures are drawn at once, the others one by one, so that the page stays responsive.
// Plotly is large: it is parsed after numbers and tables have been shown.
let queued = null;
function loadPlotly() {
  const source = byId('plotly-source');
  document.head.append(Object.assign(document.createElement('script'), { textContent: source.textContent }));
  source.remove();
  redraw();
}

function redraw(...ids) {
  if (!parts.main.runs.length) return;
  delete document.documentElement.dataset.drawn;
  for (const [id, entry] of figures) if (!ids.length || ids.includes(id)) entry.stale = true;
  const visible = (entry) => {
    const box = entry.figure.getBoundingClientRect();
    return box.bottom > -200 && box.top < window.innerHeight + 200;
  };
  const ready = (entry) => window.Plotly || !entry.plot;
  for (const entry of figures.values()) if (entry.stale && ready(entry) && visible(entry)) render(entry);
  if (window.Plotly && queued == null) queued = setTimeout(drawNext, 30);
}
function drawNext() {
  queued = null;
  const entry = [...figures.values()].find((one) => one.stale);
  if (!entry) {
    performance.mark('all');
    document.documentElement.dataset.drawn = 'all';
    return;
  }
  render(entry);
  queued = setTimeout(drawNext, 0);
}

const clientBox = (row, width = 0.5) => ({
  type: 'rect',
  xref: 'paper',
  x0: 0,
  x1: 1,
  yref: 'y',
  y0: row - width,
  y1: row + width,
  line: { color: css('accent'), width: 2 },
  fillcolor: 'rgba(0,0,0,0)',
});
function emptyRelations() {
  const { settings, status } = currentRun();
  if (settings.record === 'relations' && status.state !== 'finished') return 'Available after the next checkpoint.';
  return 'Not recorded. Run fedrema run with --record relations to see this figure.';
}
