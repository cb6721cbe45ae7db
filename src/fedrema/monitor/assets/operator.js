// The operator's page: nodes, failures, rejected keys, certificate.
function stateCell(node) {
  const kind = ['online', 'offline'].includes(node.state) ? node.state : 'other';
  return make('span', { class: kind }, make('span', { class: 'dot', 'aria-hidden': 'true' }), node.state);
}

function nodesTable() {
  const priv = view.nodes.some((node) => node.epsilon != null);
  const head = ['node', 'state', 'last seen', 'last round used', 'rounds', view.metric.title, 'failed', 'clipped',
    'sent', 'received', ...(priv ? ['ε spent'] : []), 'current problem'];
  const rows = view.nodes.map((node) => [
    node.name,
    stateCell(node),
    ago(node.last_seen),
    node.last_round ? String(node.last_round) : '–',
    node.rounds_used.toLocaleString('en'),
    score(view.metric, node.value),
    node.failed.toLocaleString('en'),
    node.clipped.toLocaleString('en'),
    bytesInWords(node.bytes_up),
    bytesInWords(node.bytes_down),
    ...(priv ? [node.epsilon == null ? '–' : node.epsilon.toFixed(2)] : []),
    node.problem || '–',
  ]);
  return table('nodes', head, rows, [head.length - 1]);
}

function draw() {
  byId('heading').textContent = 'Federation';
  if (!view.state) {
    show([make('p', { class: 'notes alert' }, view.error || 'The status is not known yet.')]);
    return;
  }
  byId('subtitle').replaceChildren(
    `${view.method} · ${view.state}`, ' · ', make('a', { href: 'run/' }, 'learning curves and clients'),
  );
  const online = view.nodes.filter((node) => node.state === 'online').length;
  const unknown = view.nodes.some((node) => node.state === 'unknown');
  const failing = view.nodes.filter((node) => node.problem).length;
  const days = view.certificate_days;
  const failures = view.nodes
    .flatMap((node) => node.failures.map((each) => ({ node: node.name, ...each })))
    .sort((a, b) => b.time.localeCompare(a.time));
  const keys = view.rejected_keys;
  show([
    view.error ? make('p', { class: 'notes alert' }, view.error) : null,
    make(
      'div',
      { class: 'cards' },
      card('Round', `${view.round} of ${view.rounds}`, `last completed ${ago(view.last_round_time)}`),
      card('Nodes online', unknown ? 'unknown' : `${online} of ${view.nodes.length}`,
        failing ? `${plural(failing, 'node')} with a problem` : unknown ? 'the server does not run' : 'no current problem', failing ? 'problem' : ''),
      card(capitalised(view.metric.title), score(view.metric, view.value), 'over the test samples of all nodes'),
      card('Certificate', days < 0 ? 'expired' : plural(days, 'day'),
        days < 30 ? 'renew it with fedrema deploy renew' : 'left', days < 30 ? 'problem' : ''),
    ),
    section('heading-nodes', 'Nodes', nodesTable()),
    section('heading-failures', 'Latest failures', failuresTable('latest failures', failures)),
    section('heading-keys', 'Rejected keys',
      keys.length
        ? table('rejected keys', ['key', 'node', 'reason', 'attempts', 'last (UTC)'],
            keys.map((key) => [key.fingerprint, key.name || 'not registered', key.reason, String(key.attempts),
              key.last.slice(0, 19).replace('T', ' ')]), [2])
        : sentence('None in the last hour.')),
    section('heading-audit', 'Audit log', auditState(view.audit)),
  ]);
}

begin(draw);
