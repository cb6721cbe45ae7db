// Is joining worthwhile? The gain of each client over a baseline.
const conclusionColours = { gain: '#009E73', loss: '#D55E00', 'no difference shown': '#7F7F7F', 'too few samples': '#7F7F7F', 'not tested': '#7F7F7F' };
const gainText = (found, value) => {
  if (value == null) return '–';
  return found.percent ? (100 * value).toFixed(1) : String(+value.toPrecision(3));
};
const intervalText = (found, one) =>
  one.low == null ? '–' : `${gainText(found, one.low)} to ${gainText(found, one.high)}`;
const verdictHidden = () => !parts.verdict || (!parts.verdict.note && !parts.verdict.methods.length);

function drawVerdict() {
  const found = parts.verdict;
  byId('verdict').closest('section').hidden = verdictHidden();
  if (verdictHidden() || !found.methods.length) return { hidden: true };
  const names = Object.keys(found.methods[0].counts).filter(
    (name) => name !== 'not tested' || found.methods.some((method) => method.counts[name]),
  );
  const unit = found.percent ? `${found.metric}, points` : found.metric;
  const cells = (tag, values) => values.map((value) => make(tag, tag === 'th' ? { scope: 'col' } : {}, value));
  const head = make('tr', {}, ...cells('th', ['method', ...names, 'mean gain', '95 % interval']));
  const body = found.methods.map((method) =>
    make(
      'tr',
      {},
      make('th', { scope: 'row' }, method.label),
      ...cells('td', [...names.map((name) => String(method.counts[name])), gainText(found, method.mean_gain), intervalText(found, method)]),
    ),
  );
  byId('verdict')
    .querySelector('.scroll')
    .replaceChildren(make('table', {}, make('thead', {}, head), make('tbody', {}, ...body)));
  return {
    rows: () => [
      ['method', 'baseline', ...names, 'mean_gain', 'low', 'high'],
      ...found.methods.map((method) => [
        method.label,
        found.baseline,
        ...names.map((name) => method.counts[name]),
        method.mean_gain,
        method.low,
        method.high,
      ]),
    ],
    caption: `${found.warning ? `${found.warning} ` : ''}Number of clients by conclusion, compared with ${found.baseline} (${unit}). The mean gain counts each client once. ${found.methods.map((method) => `${method.label}: ${method.sentence}`).join(' ')}`,
  };
}

function drawGains() {
  const found = parts.verdict;
  if (verdictHidden()) return { hidden: true };
  if (!found.methods.length) return { empty: found.note };
  const select = byId('choose-verdict');
  if (!found.methods.some((method) => method.label === state.verdict)) state.verdict = found.methods.at(-1).label;
  options(select, found.methods.map((method) => [method.label, method.label]), state.verdict);
  select.parentElement.hidden = found.methods.length < 2;
  const method = found.methods.find((each) => each.label === state.verdict);
  const clients = method.clients.filter((client) => client.gain != null).reverse();
  const scale = found.percent ? 100 : 1;
  const data = Object.keys(method.counts)
    .map((name) => [name, clients.filter((client) => client.conclusion === name)])
    .filter(([, chosen]) => chosen.length)
    .map(([name, chosen]) => ({
      type: 'scatter',
      mode: 'markers',
      name,
      x: chosen.map((client) => scale * client.gain),
      y: chosen.map((client) => clients.indexOf(client)),
      marker: { size: 8, color: conclusionColours[name], symbol: ['too few samples', 'not tested'].includes(name) ? 'circle-open' : 'circle' },
      error_x: {
        type: 'data',
        symmetric: false,
        thickness: 1.5,
        width: 3,
        color: conclusionColours[name],
        array: chosen.map((client) => (client.high == null ? 0 : scale * (client.high - client.gain))),
        arrayminus: chosen.map((client) => (client.low == null ? 0 : scale * (client.gain - client.low))),
      },
      customdata: chosen.map((client) => [safe(client.name), intervalText(found, client), client.samples]),
      hovertemplate: `%{customdata[0]}: %{x:+.3~g}<br>%{customdata[1]}, %{customdata[2]} samples<br>${name}<extra></extra>`,
    }));
  const named = clients.length <= 60;
  return {
    data,
    words: `Gain of ${method.label} over ${found.baseline} for each client. ${method.sentence}`,
    layout: {
      height: 140 + (named ? 18 * clients.length : 600),
      yaxis: axis({
        showgrid: false,
        title: named ? '' : 'Clients, by gain',
        showticklabels: named,
        tickvals: named ? clients.map((_, at) => at) : [],
        ticktext: named ? clients.map((client) => safe(short(client.name))) : [],
      }),
      xaxis: axis({
        title: `Gain over ${safe(found.baseline)} in ${safe(found.metric)}${found.percent ? ', percentage points' : ' (positive is better)'}`,
        zeroline: true,
        zerolinewidth: 2,
        zerolinecolor: css('muted'),
      }),
    },
    caption: `${method.label} compared with ${found.baseline}: ${method.sentence} ${found.explanation}`,
    rows: () => [
      ['method', 'compared_with', 'client', 'samples', 'value', 'baseline', 'gain', 'low', 'high', 'conclusion'],
      ...found.methods.flatMap((each) =>
        each.clients.map((client) => [
          each.label,
          found.baseline,
          client.name,
          ...['samples', 'value', 'baseline', 'gain', 'low', 'high', 'conclusion'].map((name) => client[name]),
        ]),
      ),
    ],
  };
}
