// The document, the state of the controls, and functions that every figure needs.
const parts = {};
const state = { run: 0, client: null, round: null, quantity: null, difference: null, matrix: null, trace: null, verdict: null };
const byId = (id) => document.getElementById(id);

function readParts() {
  for (const name of ['main', 'clients', 'relations', 'verdict']) {
    const element = byId(`part-${name}`);
    parts[name] = element ? JSON.parse(element.textContent) : null;
    element?.remove();
  }
}

const unpacked = new WeakMap();
// Arrays are sixteen-bit codes; the highest code is a missing value.
function unpack(packed) {
  if (!packed) return null;
  if (!unpacked.has(packed)) {
    const bytes = Uint8Array.from(atob(packed.data), (character) => character.charCodeAt(0));
    const view = new DataView(bytes.buffer);
    const values = new Float32Array(bytes.length / 2);
    for (let place = 0; place < values.length; place += 1) {
      const value = view.getUint16(2 * place, true);
      values[place] = value === 65535 ? NaN : (value / 65534) * packed.highest;
    }
    unpacked.set(packed, { values, shape: packed.shape });
  }
  return unpacked.get(packed);
}

// Row of a table [rows, columns]; page `at` of a stack [pages, rows, columns] as a list of rows.
const rowOf = (table, row) => table.values.subarray(row * table.shape[1], (row + 1) * table.shape[1]);
const columnOf = (table, column) =>
  Array.from({ length: table.shape[0] }, (_, row) => table.values[row * table.shape[1] + column]);
function pageOf(stack, at) {
  const [, rows, columns] = stack.shape;
  return Array.from({ length: rows }, (_, row) => {
    const start = (at * rows + row) * columns;
    return stack.values.subarray(start, start + columns);
  });
}

const percent = (share, digits = 1) =>
  share == null || Number.isNaN(share) ? '–' : `${(100 * share).toFixed(digits)} %`;
// Metrics, the task's primary one first; that of a quantity by round or of a statistic, null for any other.
const primary = () => parts.main.metrics[0];
const metricOf = (quantity) =>
  quantity === 'worst_tenth'
    ? primary()
    : (parts.main.metrics.find((one) => one.name === quantity.replace(/^(trained|honest|best|final)_/, '')) ?? null);
const factorOf = (metric) => (metric.percent ? 100 : 1);
const signOf = (metric) => (metric.higher_is_better ? 1 : -1);
const axisTitle = (metric) => `${capitalised(metric.title)}${metric.percent ? ' (%)' : ''}`;
// A number with three significant digits; large ones without decimals.
function significant(value) {
  const size = Math.abs(value);
  if (size === 0) return '0';
  return size >= 999.5 && size < 1e6 ? value.toFixed(0) : value.toPrecision(3);
}
const shown = (metric, value) => (metric.percent ? (100 * value).toFixed(1) : significant(value));
// A standard deviation, with the decimals of the mean.
const spreadOf = (metric, value, spread) =>
  metric.percent ? shown(metric, spread) : spread.toFixed(shown(metric, value).split('.')[1]?.length ?? 0);
const withUnit = (metric, value) =>
  metric.percent ? percent(value) : value == null || Number.isNaN(value) ? '–' : significant(value);
const signed = (metric, value) => `${value >= 0 ? '+' : '−'}${shown(metric, Math.abs(value))}`;
const forHover = (metric, axis) => `%{${axis}:${metric.percent ? '.1f' : '.3~g'}}${metric.percent ? ' %' : ''}`;
const known = (values) => Array.from(values).filter((value) => value != null && !Number.isNaN(value));
const mean = (values) => (values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : NaN);
function quantile(sorted, share) {
  const place = (sorted.length - 1) * share;
  const low = Math.floor(place);
  return sorted[low] + (sorted[Math.ceil(place)] - sorted[low]) * (place - low);
}
function bytesInWords(count) {
  const units = ['B', 'kB', 'MB', 'GB', 'TB'];
  let unit = 0;
  while (count >= 1000 && unit < units.length - 1) {
    count /= 1000;
    unit += 1;
  }
  return `${count >= 100 || unit === 0 ? count.toFixed(0) : count.toFixed(1)} ${units[unit]}`;
}
function secondsInWords(seconds) {
  if (seconds < 90) return `${seconds < 10 ? seconds.toFixed(1) : Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return seconds < 172800 ? `${(seconds / 3600).toFixed(1)} h` : `${Math.round(seconds / 86400)} days`;
}
const plural = (count, word) => `${count.toLocaleString('en')} ${word}${count === 1 ? '' : 's'}`;

// Client names may contain anything; Plotly interprets some HTML in texts.
const safe = (text) => String(text).replace(/&/g, '&amp;').replace(/</g, '&lt;').replace(/>/g, '&gt;');
const short = (text) => (String(text).length > 14 ? `${String(text).slice(0, 13)}…` : String(text));

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === true) element.setAttribute(name, '');
    else if (value != null && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child != null));
  return element;
}

function options(select, items, chosen) {
  const wanted = items.map(([value, label]) => `${value}\n${label}`).join('\n\n');
  if (select.dataset.items !== wanted) {
    select.replaceChildren(...items.map(([value, label]) => make('option', { value }, label)));
    select.dataset.items = wanted;
  }
  select.value = chosen ?? '';
}

// For screen readers.
function announce(sentence) {
  byId('announcement').textContent = sentence;
}

const currentRun = () => parts.main.runs[state.run];
const currentGroup = () => parts.main.groups[currentRun().group];
const clientsOfRun = () => parts.clients?.runs[state.run] ?? null;
const relations = () => parts.relations?.runs[state.run] ?? null;
// What the method of a run declares about its reports.
const reportsOf = (run) => parts.main.groups[run.group].reports;
const matrixOf = (name) =>
  reportsOf(currentRun()).matrices.find((matrix) => matrix.name === name) ?? {
    name,
    title: name,
    kind: null,
    description: `The matrix that the method calls ${name}.`,
  };
const firstOfKind = (found, kinds) =>
  kinds
    .map((kind) => Object.keys(found?.matrices ?? {}).find((name) => matrixOf(name).kind === kind))
    .find((name) => name != null) ?? null;
const capitalised = (text) => text.charAt(0).toUpperCase() + text.slice(1);
const nameOf = (client) => currentRun().names[client] ?? String(client);
function runLabel(run) {
  const group = parts.main.groups[run.group];
  return parts.main.runs.filter((other) => other.group === run.group).length > 1
    ? `${group.label}, seed ${run.seed}`
    : group.label;
}

function save(name, text, kind) {
  const link = make('a', { download: name, href: URL.createObjectURL(new Blob([text], { type: kind })) });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
function asCsv(rows) {
  const cell = (value) => {
    let text = value == null || (typeof value === 'number' && Number.isNaN(value)) ? '' : String(value);
    if (typeof value === 'string' && /^[=+\-@\t\r]/.test(text)) text = `'${text}`; // no formula in a spreadsheet
    return /[",\n\r]/.test(text) ? `"${text.replace(/"/g, '""')}"` : text;
  };
  return `${rows.map((row) => Array.from(row, cell).join(',')).join('\n')}\n`;
}
