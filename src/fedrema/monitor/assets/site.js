// The page of a site: its own results and its audit log.
const NS = 'http://www.w3.org/2000/svg';
function drawn(tag, attributes, ...children) {
  const element = document.createElementNS(NS, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function chart(results) {
  const points = results.flatMap((each) => [each.received, each.trained].filter((value) => value != null));
  if (results.length < 2 || !points.length) return sentence('The curve appears after two rounds.');
  const [width, height, left, bottom, top] = [1000, 300, 66, 34, 12];
  const { percent: isShare } = view.metric;
  let [low, high] = [Math.min(...points), Math.max(...points)];
  if (low === high) [low, high] = [low - (isShare ? 0.05 : 1), high + (isShare ? 0.05 : 1)];
  const [first, last] = [results[0].round, results.at(-1).round];
  const x = (round) => left + ((width - left - 14) * (round - first)) / Math.max(1, last - first);
  const y = (value) => height - bottom - ((height - bottom - top) * (value - low)) / (high - low);
  const path = (name) =>
    results.filter((each) => each[name] != null).map((each) => `${x(each.round).toFixed(1)},${y(each[name]).toFixed(1)}`).join(' ');
  const levels = [0, 1, 2, 3, 4].map((step) => low + ((high - low) * step) / 4);
  const words = `${capitalised(view.metric.title)} by round, from ${score(view.metric, results[0].received ?? results[0].trained)} in round ${first} to ${score(view.metric, results.at(-1).received ?? results.at(-1).trained)} in round ${last}.`;
  return drawn('svg', { class: 'chart', viewBox: `0 0 ${width} ${height}`, role: 'img', 'aria-label': words },
    ...levels.flatMap((level) => [
      drawn('line', { class: 'axis', x1: left, x2: width - 14, y1: y(level), y2: y(level) }),
      drawn('text', { x: left - 8, y: y(level) + 4, 'text-anchor': 'end' }, score(view.metric, level)),
    ]),
    drawn('text', { x: left, y: height - 8 }, `round ${first}`),
    drawn('text', { x: width - 14, y: height - 8, 'text-anchor': 'end' }, `round ${last}`),
    drawn('polyline', { class: 'second', points: path('trained') }),
    drawn('polyline', { class: 'first', points: path('received') }),
  );
}

function resultsTable(results) {
  const latest = results.slice(-20).reverse();
  return table('results by round', ['round', 'time (UTC)', 'received model', 'after training', 'loss', 'samples'],
    latest.map((each) => [
      String(each.round), each.time.slice(0, 19).replace('T', ' '), score(view.metric, each.received),
      score(view.metric, each.trained), each.loss == null ? '–' : each.loss.toFixed(4), each.samples.toLocaleString('en'),
    ]));
}

function draw() {
  byId('heading').textContent = `Node ${view.name}`;
  const { state: now, problem } = view.connection;
  byId('subtitle').textContent = `server ${view.server} · ${now}`;
  const last = view.results.at(-1);
  show([
    problem && now !== 'connected' ? make('p', { class: 'notes' }, capitalised(`${problem}${/[.]$/.test(problem) ? '' : '.'}`)) : null,
    make(
      'div',
      { class: 'cards' },
      card('Last round', last ? String(last.round) : '–', `last reply ${ago(view.last_reply)}; ${plural(view.rounds, 'round')} in all`),
      card(capitalised(view.metric.title), score(view.metric, last?.received ?? last?.trained), 'of the received model, on this node’s test samples'),
      card('Sent', bytesInWords(view.bytes_up), `received ${bytesInWords(view.bytes_down)}`),
      view.noise
        ? card('ε spent', view.epsilon == null ? 'unlimited' : view.epsilon.toFixed(2), view.budget ? `of a budget of ${view.budget}` : 'no budget is set')
        : card('Noise', 'none', 'privacy-clip is not set in node.toml'),
    ),
    section('heading-results', 'Results of this node',
      make('div', { class: 'legend' },
        make('span', {}, make('span', { class: 'swatch first' }), `${view.metric.title} of the received model`),
        make('span', {}, make('span', { class: 'swatch second' }), 'after local training')),
      chart(view.results)),
    view.results.length ? section('heading-rounds', 'Latest rounds', resultsTable(view.results)) : null,
    section('heading-refused', 'Refused requests and failures', failuresTable('refused requests', [...view.failures].reverse())),
    section('heading-audit', 'Audit log', auditState(view.audit),
      make('div', { class: 'log', tabindex: '0', role: 'region', 'aria-label': 'Latest lines of the audit log' },
        make('ol', {}, ...view.audit.latest.map((line) => make('li', {}, line))))),
  ]);
}

begin(draw);
