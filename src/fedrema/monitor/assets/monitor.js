// What the pages of an operator and of a site have in common: updates, theme, cards, tables.
let view = JSON.parse(byId('view').textContent);
let arrived = Date.now();
let connected = true;

const ago = (seconds) =>
  seconds == null ? '–' : `${secondsInWords(Math.max(0, Date.now() / 1000 - seconds))} ago`;
const score = (metric, value) => (value == null ? '–' : withUnit(metric, value));

function card(name, value, more = '', kind = '') {
  return make(
    'div',
    { class: 'card' },
    make('div', { class: 'name' }, name),
    make('div', { class: `value ${kind}` }, value),
    make('div', { class: 'more' }, more),
  );
}

// Cells are texts or elements; `texts` are the columns that hold sentences.
function table(label, head, rows, texts = []) {
  const kind = (column) => (texts.includes(column) ? 'text' : null);
  return make(
    'div',
    { class: 'scroll', tabindex: '0', role: 'region', 'aria-label': `Table: ${label}` },
    make(
      'table',
      {},
      make('thead', {}, make('tr', {}, ...head.map((text, at) => make('th', { scope: 'col', class: kind(at) }, text)))),
      make(
        'tbody',
        {},
        ...rows.map((row) =>
          make(
            'tr',
            {},
            ...row.map((cell, at) =>
              make(at === 0 ? 'th' : 'td', { scope: at === 0 ? 'row' : null, class: kind(at) }, cell),
            ),
          ),
        ),
      ),
    ),
  );
}

function section(id, title, ...content) {
  return make(
    'section',
    { 'aria-labelledby': id },
    make('h2', { id }, title),
    make('div', { class: 'panel' }, ...content),
  );
}

const sentence = (text, kind = '') => make('p', { class: `facts ${kind}` }, text);

function auditState(audit) {
  return audit.problem
    ? sentence(`The audit log is damaged. ${audit.problem}`, 'problem')
    : sentence(`${plural(audit.lines, 'line')}; the chain of hashes is complete.`, 'fine');
}

function failuresTable(label, rows) {
  return rows.length
    ? table(label, rows[0].node == null ? ['time (UTC)', 'round', 'reason'] : ['node', 'time (UTC)', 'round', 'reason'],
        rows.map((row) => [
          ...(row.node == null ? [] : [row.node]),
          row.time.slice(0, 19).replace('T', ' '),
          row.round == null ? '–' : String(row.round),
          row.reason,
        ]), [rows[0].node == null ? 2 : 3])
    : sentence('None.');
}

// Keeps the focus and the scroll positions of regions, which are replaced.
function show(content) {
  const regions = () => [...document.querySelectorAll('main [role=region]')];
  const before = regions().map((one) => [one.getAttribute('aria-label'), one.scrollLeft, one.scrollTop]);
  const focused = document.activeElement?.getAttribute?.('aria-label');
  byId('content').replaceChildren(...content.filter((one) => one != null));
  for (const one of regions()) {
    const label = one.getAttribute('aria-label');
    const found = before.find(([name]) => name === label);
    if (found) [, one.scrollLeft, one.scrollTop] = found;
    if (label === focused) one.focus({ preventScroll: true });
  }
  byId('updated').textContent = connected
    ? `Updated ${secondsInWords((Date.now() - arrived) / 1000)} ago. This page updates itself.`
    : 'The connection is lost: the page shows the last known state, and tries again.';
  byId('updated').className = connected ? '' : 'problem';
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  byId('theme').setAttribute('aria-pressed', String(theme === 'dark'));
}

function begin(draw) {
  const dark = matchMedia('(prefers-color-scheme: dark)');
  setTheme(dark.matches ? 'dark' : 'light');
  dark.addEventListener('change', () => setTheme(dark.matches ? 'dark' : 'light'));
  byId('theme').addEventListener('click', () =>
    setTheme(document.documentElement.dataset.theme === 'dark' ? 'light' : 'dark'),
  );
  draw();
  const source = new EventSource('events');
  source.onmessage = (event) => {
    view = JSON.parse(event.data);
    arrived = Date.now();
    draw();
  };
  const turn = (on) => () => {
    if (connected !== on) announce(on ? 'The connection is restored.' : 'The connection is lost.');
    connected = on;
    if (on) arrived = Date.now();
    draw();
  };
  source.onopen = turn(true);
  source.onerror = turn(false);
  setInterval(draw, 5000); // ages grow between updates
}
