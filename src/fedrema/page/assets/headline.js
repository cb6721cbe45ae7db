// Results: cards, table of methods, differences with confidence intervals.
const honest = () => `honest_${primary().name}`;
function scoreColumns() {
  const [{ name, title }, ...others] = parts.main.metrics;
  return [
    [`honest_${name}`, 'honest', `honest ${title}`],
    [`best_${name}`, 'best (peeks)', `best ${title}`],
    [`final_${name}`, 'final (last 5)', `final ${title}`],
    ['worst_tenth', 'worst tenth', `${title} of the worst tenth`],
    ...others.map((metric) => [`final_${metric.name}`, metric.title, `final ${metric.title}`]),
  ];
}
const columns = () => [
  ...scoreColumns(),
  ...Object.entries(parts.main.periods),
  ['epsilon', 'ε spent'],
  ['seconds', 'seconds'],
  ['bytes_up', 'sent'],
  ['bytes_down', 'received'],
];

function leader() {
  const scored = parts.main.groups.filter((group) => group.statistics[honest()]);
  const value = (group) => signOf(primary()) * group.statistics[honest()][0];
  return scored.sort((a, b) => value(b) - value(a))[0] ?? null;
}

function card(name, value, more) {
  return make(
    'div',
    { class: 'card' },
    make('div', { class: 'name' }, name),
    make('div', { class: 'value' }, value),
    make('div', { class: 'more' }, more),
  );
}

// The status at the top of the page says whether it is running or stopped.
function progressOf(group) {
  const going = parts.main.runs.filter(
    (run) => parts.main.groups[run.group] === group && run.status.state !== 'finished',
  );
  return going.length
    ? `(round ${Math.min(...going.map((run) => run.status.done)).toLocaleString('en')} of ${going[0].status.rounds.toLocaleString('en')})`
    : '';
}

const inPeriod = (group) => parts.main.runs.some((run) => parts.main.groups[run.group] === group && run.in_period);

function drawCards() {
  const best = leader();
  const cards = [];
  const several = parts.main.groups.length > 1;
  const metric = primary();
  if (best) {
    const [value, spread] = best.statistics[honest()];
    const over = best.seeds > 1 ? `mean of ${best.seeds} seeds, spread ± ${spreadOf(metric, value, spread)}` : 'one seed';
    const better = parts.main.simple
      .filter((one) => one.statistics[honest()] && signOf(metric) * (one.statistics[honest()][0] - value) > 0)
      .map((one) => one.label.split(',')[0].toLowerCase());
    const simpler = better.length ? `; each client’s own ${better.join(' or ')} model is better` : '';
    cards.push(
      card(
        several && parts.main.comparable ? `${best.label} leads: ${metric.title}` : `${best.label}: ${metric.title}`,
        withUnit(metric, value),
        `honest ${metric.title}${metric.higher_is_better ? '' : ', lower is better'}; ${over}${simpler}`,
      ),
    );
    const found = parts.main.differences[honest()]?.rows.filter((row) => row.mean != null) ?? [];
    const next = found.sort((a, b) => signOf(metric) * (b.mean - a.mean))[0];
    if (next) {
      const bounds = [next.low, next.high].map((bound) => -signOf(metric) * bound).sort((a, b) => a - b);
      const between =
        next.low == null ? next.reason : `between ${bounds.map((bound) => signed(metric, bound)).join(' and ')}`;
      const sure =
        next.low == null
          ? between
          : next.low <= 0 && next.high >= 0
            ? `not significant: ${between}, 95 % confidence`
            : `95 % confidence: ${between}`;
      const lead = shown(metric, Math.abs(next.mean));
      cards.push(card(`Ahead of ${next.label} by`, metric.percent ? `${lead} points` : lead, sure));
    }
    const worst = best.statistics.worst_tenth;
    if (worst)
      cards.push(
        card('Worst tenth of the clients', withUnit(metric, worst[0]), `${best.label}, last five evaluated rounds`),
      );
    const { period } = best.reports;
    const lasted = period && best.statistics[`${period.name}_rounds`];
    if (lasted)
      cards.push(
        card(
          `Length of the ${period.title}`,
          `${+lasted[0].toFixed(1)} rounds`,
          inPeriod(best) ? 'so far: it has not ended' : `later rounds: ${period.after}`,
        ),
      );
  } else {
    cards.push(card(capitalised(metric.title), '–', 'no round has been evaluated yet'));
  }
  const run = currentRun();
  if (cards.length < 4)
    cards.push(card('Clients', String(run.names.length), `${run.status.done} of ${run.status.rounds} rounds`));
  byId('cards').replaceChildren(...cards);
}

function cellText(name, statistic) {
  if (!statistic) return '–';
  const [value, spread] = statistic;
  const metric = metricOf(name);
  if (metric) return `${shown(metric, value)}${spread == null ? '' : ` ± ${spreadOf(metric, value, spread)}`}`;
  if (name.startsWith('bytes')) return bytesInWords(value);
  return value < 100 ? value.toFixed(1) : value.toFixed(0);
}

function drawComparison() {
  const groups = parts.main.groups;
  const columnsShown = columns().filter(([name]) => groups.some((group) => group.statistics[name]));
  const highest = Object.fromEntries(
    columnsShown
      .filter(([name]) => metricOf(name))
      .map(([name]) => {
        const means = known([...groups, ...parts.main.simple].map((one) => one.statistics[name]?.[0]));
        return [name, metricOf(name).higher_is_better ? Math.max(...means) : Math.min(...means)];
      }),
  );
  const head = make(
    'tr',
    {},
    ...['method', 'seeds', ...columnsShown.map(([, label]) => label)].map((label) => make('th', { scope: 'col' }, label)),
  );
  const body = groups.map((group) => {
    const name = make(
      'th',
      { scope: 'row' },
      make('span', {
        class: 'swatch',
        style: `border-color:${ink(group.colour)};border-top-style:${group.dash === 'solid' ? 'solid' : 'dashed'}`,
      }),
      `${group.label} ${progressOf(group)}`.trim(),
    );
    const cells = columnsShown.map(([column]) => {
      const best =
        groups.length + parts.main.simple.length > 1 &&
        parts.main.comparable &&
        group.statistics[column] &&
        group.statistics[column][0] === highest[column];
      return make('td', { class: best ? 'best' : null }, cellText(column, group.statistics[column]));
    });
    return make('tr', {}, name, make('td', {}, String(group.seeds)), ...cells);
  });
  const simple = parts.main.simple.map((one) => {
    const cells = columnsShown.map(([column]) => {
      const best = one.statistics[column] && one.statistics[column][0] === highest[column];
      return make('td', { class: best ? 'best' : null }, cellText(column, one.statistics[column]));
    });
    return make('tr', {}, make('th', { scope: 'row' }, one.label), make('td', {}, '–'), ...cells);
  });
  byId('comparison')
    .querySelector('.scroll')
    .replaceChildren(make('table', {}, make('thead', {}, head), make('tbody', {}, ...body, ...simple)));
  const rows = () => [
    ['method', 'seeds', ...columnsShown.flatMap(([name]) => [name, `${name}_std`])],
    ...groups.map((group) => [
      group.label,
      group.seeds,
      ...columnsShown.flatMap(([name]) => group.statistics[name] ?? ['', '']),
    ]),
    ...parts.main.simple.map((one) => [
      one.label,
      '',
      ...columnsShown.flatMap(([name]) => one.statistics[name] ?? ['', '']),
    ]),
  ];
  return { rows, caption: `${parts.main.explanation} Sent and received: by all clients, over the whole run.` };
}

function drawDifferences() {
  const found = parts.main.differences[state.difference];
  if (parts.main.groups.length < 2) return { hidden: true };
  if (!found) return { empty: 'No comparison is available yet.' };
  const metric = metricOf(state.difference);
  const [factor, unit] = metric.percent ? [100, ' points'] : [1, ''];
  const drawn = found.rows.filter((row) => row.mean != null).sort((a, b) => signOf(metric) * (a.mean - b.mean));
  if (!drawn.length) return { empty: found.rows.map((row) => `${row.label}: ${row.reason}`).join('; ') };
  const trace = {
    type: 'scatter',
    mode: 'markers',
    y: drawn.map((row) => safe(row.label)),
    x: drawn.map((row) => factor * row.mean),
    marker: {
      size: 11,
      color: drawn.map((row) => ink(parts.main.groups.find((group) => group.label === row.label).colour)),
    },
    error_x: {
      type: 'data',
      symmetric: false,
      thickness: 2,
      width: 6,
      color: css('muted'),
      array: drawn.map((row) => (row.high == null ? 0 : factor * (row.high - row.mean))),
      arrayminus: drawn.map((row) => (row.low == null ? 0 : factor * (row.mean - row.low))),
    },
    customdata: drawn.map((row) =>
      row.low == null ? row.reason : `${signed(metric, row.low)} to ${signed(metric, row.high)}, ${row.pairs} seeds`,
    ),
    hovertemplate: `%{y}: %{x:${metric.percent ? '+.1f' : '+.3~g'}}${unit}<br>%{customdata}<extra></extra>`,
  };
  const words = drawn
    .map(
      (row) =>
        `${row.label}: ${signed(metric, row.mean)}${unit}${row.low == null ? '' : `, ${signed(metric, row.low)} to ${signed(metric, row.high)}`}`,
    )
    .join('; ');
  const rest = found.rows
    .filter((row) => row.mean == null)
    .map((row) => ` ${row.label}: ${row.reason}.`)
    .join('');
  return {
    data: [trace],
    words: `Differences to ${found.reference}. ${words}`,
    layout: {
      height: 110 + 42 * drawn.length,
      showlegend: false,
      yaxis: axis({ showgrid: false }),
      xaxis: axis({
        title: `Difference to ${safe(found.reference)}${metric.percent ? ', percentage points' : ` in ${metric.title}`}${metric.higher_is_better ? '' : ', negative is better'}`,
        zeroline: true,
        zerolinewidth: 2,
        zerolinecolor: css('muted'),
        rangemode: 'tozero',
      }),
    },
    caption: `Mean paired difference of each method to ${found.reference}, with its 95 % confidence interval. An interval that does not include zero indicates a significant difference. ${parts.main.confidence}${rest}`,
    rows: () => [
      ['method', 'reference', 'difference', 'low', 'high', 'pairs', 'reason'],
      ...found.rows.map((row) => [row.label, found.reference, row.mean, row.low, row.high, row.pairs, row.reason]),
    ],
  };
}
