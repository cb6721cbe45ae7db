// The figures of the page "How FedReMa works". Everything is computed here from the similarities of one run.
'use strict';

const SPACE = 'http://www.w3.org/2000/svg';
const INTERVAL = 900; // milliseconds between rounds while playing
const still = window.matchMedia('(prefers-reduced-motion: reduce)');

function svg(name, attributes = {}, text = '') {
  const element = document.createElementNS(SPACE, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text) element.textContent = text;
  return element;
}

function html(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

// Rows of S for one round, from the stored pairs i < j.
function matrixOf(data, round) {
  const rows = Array.from({ length: data.clients }, (_, row) => {
    const values = new Array(data.clients).fill(0);
    values[row] = 1;
    return values;
  });
  let at = 0;
  for (let i = 0; i < data.clients; i += 1) {
    for (let j = i + 1; j < data.clients; j += 1) {
      rows[i][j] = rows[j][i] = data.rounds[round - 1][at] / data.scale;
      at += 1;
    }
  }
  return rows;
}

// Maximum difference segmentation (Algorithm 1): the ranked clients, the place of the largest gap, and the chosen ones.
function segment(row) {
  const ranked = row.map((value, client) => ({ client, value }));
  ranked.sort((one, other) => other.value - one.value || other.client - one.client);
  let place = 0;
  let gap = -1;
  for (let at = 0; at + 1 < ranked.length; at += 1) {
    const difference = ranked[at].value - ranked[at + 1].value;
    if (difference >= gap) [place, gap] = [at, difference]; // of equal gaps, the lowest counts
  }
  return { ranked, place, gap, chosen: new Set(ranked.slice(0, place + 2).map((each) => each.client)) };
}

function analysed(data) {
  let peak = 0;
  return data.rounds.map((_, at) => {
    const matrix = matrixOf(data, at + 1);
    const cuts = matrix.map(segment);
    const gap = cuts.reduce((sum, cut) => sum + cut.gap, 0) / cuts.length;
    peak = Math.max(peak, gap);
    return { matrix, cuts, gap, ratio: gap / peak };
  });
}

// Last round of the critical period: the first one in which the mean gap is at most δ of its peak so far.
function endOf(steps, delta) {
  const at = steps.findIndex((step) => step.ratio <= delta);
  return at < 0 ? steps.length : at + 1;
}

function counted(steps, end) {
  const size = steps[0].matrix.length;
  const counts = Array.from({ length: size }, () => new Array(size).fill(0));
  for (const step of steps.slice(0, end)) {
    step.cuts.forEach((cut, row) => cut.chosen.forEach((column) => { counts[row][column] += 1; }));
  }
  return counts;
}

function figureOf(width, height) {
  return svg('svg', { viewBox: `0 0 ${width} ${height}`, role: 'img', class: 'figure' });
}

function describe(figure, sentence) {
  figure.setAttribute('aria-label', sentence);
}

// A square for each pair of clients; `outlined` are pairs with a frame.
function heatMap(figure, values, highest, row, outlined) {
  const size = values.length;
  const side = 300 / size;
  figure.replaceChildren();
  values.forEach((line, i) => line.forEach((value, j) => {
    figure.append(svg('rect', {
      x: 30 + j * side, y: 24 + i * side, width: side, height: side, class: 'cell', 'fill-opacity': (value / highest).toFixed(3),
    }));
  }));
  outlined.forEach(([i, j]) => figure.append(svg('rect', {
    x: 31 + j * side, y: 25 + i * side, width: side - 2, height: side - 2, class: 'chosen-cell',
  })));
  if (row !== null) {
    figure.append(svg('rect', { x: 30, y: 24 + row * side, width: 300, height: side, class: 'chosen-row' }));
  }
  for (let client = 0; client < size; client += 4) {
    figure.append(svg('text', { x: 24, y: 24 + (client + 0.8) * side, 'text-anchor': 'end' }, String(client)));
    figure.append(svg('text', { x: 30 + (client + 0.5) * side, y: 18, 'text-anchor': 'middle' }, String(client)));
  }
}

// A bar for each client, from the most to the least similar, with the largest gap.
function ranking(figure, cut, client, group) {
  const width = 300 / cut.ranked.length;
  const top = (value) => 24 + 260 * (1 - value);
  figure.replaceChildren(svg('line', { x1: 30, x2: 330, y1: top(0), y2: top(0), class: 'axis' }));
  for (const value of [0, 0.5, 1]) {
    figure.append(svg('text', { x: 26, y: top(value) + 4, 'text-anchor': 'end' }, String(value)));
  }
  cut.ranked.forEach((each, at) => {
    const same = Math.floor(each.client / group) === Math.floor(client / group);
    const x = 30 + at * width;
    figure.append(svg('rect', {
      x: x + 1.5, width: width - 3, y: top(each.value), height: top(0) - top(each.value),
      class: cut.chosen.has(each.client) ? 'bar chosen' : 'bar',
    }));
    const label = svg('text', { x: x + width / 2, y: top(0) + 14, 'text-anchor': 'middle' }, String(each.client));
    if (same) label.setAttribute('class', 'same');
    figure.append(label);
  });
  const x = 30 + (cut.place + 1) * width;
  const [above, below] = [top(cut.ranked[cut.place].value), top(cut.ranked[cut.place + 1].value)];
  figure.append(svg('line', { x1: x, x2: x, y1: above, y2: below, class: 'gap' }));
  figure.append(svg('text', { x: x + 5, y: (above + below) / 2 + 4, class: 'gap-label' }, `gap ${cut.gap.toFixed(2)}`));
}

function curve(figure, steps, round, delta, end) {
  const x = (number) => 44 + 630 * ((number - 1) / (steps.length - 1));
  const y = (ratio) => 20 + 190 * (1 - ratio);
  figure.replaceChildren(svg('rect', { x: x(1), y: y(1), width: x(end) - x(1), height: 190, class: 'period' }));
  for (const ratio of [0, 0.25, 0.5, 0.75, 1]) {
    figure.append(svg('line', { x1: x(1), x2: x(steps.length), y1: y(ratio), y2: y(ratio), class: 'grid' }));
    figure.append(svg('text', { x: 38, y: y(ratio) + 4, 'text-anchor': 'end' }, `${100 * ratio} %`));
  }
  for (const number of [1, 10, 20, 30, 40]) {
    figure.append(svg('text', { x: x(number), y: 230, 'text-anchor': 'middle' }, String(number)));
  }
  figure.append(svg('text', { x: 359, y: 248, 'text-anchor': 'middle' }, 'round'));
  figure.append(svg('polyline', { points: steps.map((step, at) => `${x(at + 1)},${y(step.ratio)}`).join(' '), class: 'curve' }));
  figure.append(svg('line', { x1: x(1), x2: x(steps.length), y1: y(delta), y2: y(delta), class: 'threshold' }));
  figure.append(svg('text', { x: x(steps.length), y: y(delta) - 5, 'text-anchor': 'end', class: 'gap-label' }, `δ = ${delta.toFixed(2)}`));
  figure.append(svg('circle', { cx: x(round), cy: y(steps[round - 1].ratio), r: 5, class: 'now' }));
}

function slider(id, label, from, to, step, value) {
  const input = html('input', { type: 'range', id, min: from, max: to, step, value });
  const shown = html('output', { for: id }, String(value));
  input.addEventListener('input', () => { shown.textContent = input.value; });
  return { input, shown, row: html('div', { class: 'control' }, html('label', { for: id }, label), input, shown) };
}

function draw(place, data) {
  const steps = analysed(data);
  const figures = { matrix: figureOf(340, 330), ranking: figureOf(340, 330), curve: figureOf(690, 256), counts: figureOf(340, 330) };
  const round = slider('figure-round', 'Round', 1, steps.length, 1, 1);
  const delta = slider('figure-delta', 'Threshold δ', 0.2, 0.95, 0.05, 0.5);
  const client = html('select', { id: 'figure-client' }, ...steps[0].matrix.map((_, row) => html('option', { value: row }, String(row))));
  const play = html('button', { type: 'button', class: 'control' }, 'Play');
  const said = { peers: html('p', { role: 'status' }), period: html('p', { role: 'status' }), counts: html('p', {}) };
  let timer = null;

  function update() {
    const [number, row, share] = [Number(round.input.value), Number(client.value), Number(delta.input.value)];
    round.shown.textContent = String(number);
    const { matrix, cuts, ratio } = steps[number - 1];
    const cut = cuts[row];
    const end = endOf(steps, share);
    const peers = [...cut.chosen].sort((one, other) => one - other).join(', ');
    heatMap(figures.matrix, matrix, 1, row, [...cut.chosen].map((column) => [row, column]));
    ranking(figures.ranking, cut, row, data.group);
    curve(figures.curve, steps, number, share, end);
    const counts = counted(steps, end);
    heatMap(figures.counts, counts, end, null, []);
    describe(figures.matrix, `Similarity of the classifiers of ${matrix.length} clients in round ${number}.`);
    describe(figures.ranking, `Clients by their similarity to client ${row} in round ${number}; the largest gap is ${cut.gap.toFixed(2)}.`);
    describe(figures.curve, `Mean gap relative to its peak in ${steps.length} rounds, with the threshold ${share.toFixed(2)}.`);
    describe(figures.counts, `Dependency map: how often each client chose each other client in ${end} critical rounds.`);
    said.peers.textContent = `Round ${number}, client ${row}: the largest gap is ${cut.gap.toFixed(2)}. Clients averaged: ${peers}.`;
    const never = steps[end - 1].ratio > share;
    said.period.textContent = `Round ${number}: the mean gap is ${(100 * ratio).toFixed(0)} % of its peak so far. With δ = ${share.toFixed(2)}, ${
      never ? `the critical period does not end in ${steps.length} rounds.` : `the critical period ends after round ${end}.`}`;
    const own = counts.reduce((sum, line, i) => sum + line.reduce((part, value, j) => part + (Math.floor(i / data.group) === Math.floor(j / data.group) ? value : 0), 0), 0);
    const all = counts.flat().reduce((sum, value) => sum + value, 0);
    said.counts.textContent = `${(100 * own / all).toFixed(0)} % of all choices in these ${end} rounds are clients of the same group.`;
  }

  function stop() {
    clearInterval(timer);
    timer = null;
    play.textContent = 'Play';
  }
  function next() {
    if (Number(round.input.value) >= steps.length) return stop();
    round.input.value = Number(round.input.value) + 1;
    return update();
  }
  play.addEventListener('click', () => {
    if (timer !== null) return stop();
    if (Number(round.input.value) >= steps.length) round.input.value = 1;
    play.textContent = 'Pause';
    timer = setInterval(next, INTERVAL);
    return update();
  });
  const choose = () => { play.hidden = still.matches; if (still.matches) stop(); };
  still.addEventListener('change', choose);
  choose();
  round.input.addEventListener('input', () => { stop(); update(); });
  for (const control of [delta.input, client]) control.addEventListener('input', update);

  const heading = (text) => html('p', { class: 'figure-title' }, text);
  const part = (title, figure) => html('div', { class: 'part' }, heading(title), figure);
  place.replaceChildren(
    html('div', { class: 'controls' }, round.row, html('div', { class: 'control' }, html('label', { for: 'figure-client' }, 'Client'), client), play),
    html('div', { class: 'parts' }, part('Similarity S of all clients', figures.matrix), part('The client’s ranking, cut at the largest gap', figures.ranking)),
    said.peers,
    html('div', { class: 'controls' }, delta.row),
    part('Mean gap of all clients, relative to its peak so far', html('div', { class: 'scrolling' }, figures.curve)),
    said.period,
    html('div', { class: 'parts' }, part('Dependency map G at the end of the period', figures.counts), html('div', { class: 'part' }, said.counts)),
  );
  update();
  place.dataset.drawn = 'all';
  document.dispatchEvent(new Event('drawn'));
  window.fedremaSteps = steps; // for tests
}

const place = document.getElementById('fedrema-figures');
const stored = document.getElementById('fedrema-steps');
if (place && stored) draw(place, JSON.parse(stored.textContent));
