// While runs train: progress, and new versions of the parts of the document.
const stateWords = { running: 'Running', finished: 'Finished', stopped: 'Stopped', silent: 'No update' };
let lost = false;

function statusCard(run) {
  const { status } = run;
  const facts = [`round ${status.done.toLocaleString('en')} of ${status.rounds.toLocaleString('en')}`];
  const now = Date.now() / 1000;
  if (status.seconds_left != null) facts.push(`about ${secondsInWords(status.seconds_left)} left`);
  if (status.updated && status.state !== 'finished')
    facts.push(`last update ${secondsInWords(Math.max(0, now - status.updated))} ago`);
  if (status.state !== 'finished')
    facts.push(
      status.checkpoint
        ? `checkpoint ${secondsInWords(Math.max(0, now - status.checkpoint))} old`
        : 'no checkpoint yet',
    );
  if (status.state === 'stopped') facts.push('continue it with fedrema resume');
  const more = (names, count) =>
    `${names.join(', ')}${count > names.length ? ` and ${count - names.length} more` : ''}`;
  if (status.absent_count && status.done)
    facts.push(`absent in the last round: ${more(status.absent, status.absent_count)}`);
  return make(
    'div',
    { class: 'status' },
    make(
      'div',
      { class: 'line' },
      make('span', { class: `state ${status.state}` }, stateWords[status.state]),
      make('strong', {}, runLabel(run)),
      make('span', { class: 'facts' }, facts.join(' · ')),
    ),
    make('progress', {
      max: Math.max(1, status.rounds),
      value: status.done,
      'aria-label': `Progress of ${runLabel(run)}`,
    }),
    status.failed_count
      ? make('div', { class: 'failed' }, `Failed in the last round: ${more(status.failed, status.failed_count)}`)
      : null,
  );
}

function drawProgress() {
  if (!parts.main?.live) return;
  byId('live').hidden = false;
  const going = parts.main.runs.filter((run) => run.status.state !== 'finished');
  const shown = parts.main.runs.length <= 4 ? parts.main.runs : going.slice(0, 4);
  const cards = shown.map(statusCard);
  const rest = parts.main.runs.length - shown.length;
  if (lost)
    cards.unshift(
      make(
        'div',
        { class: 'status' },
        make(
          'span',
          { class: 'state lost' },
          'fedrema watch has ended or cannot be reached: this page is no longer updated.',
        ),
      ),
    );
  if (rest > 0)
    cards.push(
      make(
        'div',
        { class: 'status' },
        make(
          'span',
          { class: 'facts' },
          `${plural(rest, 'more run')}: ${parts.main.runs.filter((run) => run.status.state === 'finished').length} of ${parts.main.runs.length} runs are finished.`,
        ),
      ),
    );
  byId('progress').replaceChildren(...cards);
}

async function fetchPart(name) {
  const answer = await fetch(`parts/${name}`, { cache: 'no-store' });
  if (!answer.ok) throw new Error(answer.statusText);
  return answer.json();
}

function goLive() {
  const versions = {};
  let latest = null;
  let busy = false;
  const source = new EventSource('events');
  source.onmessage = (event) => {
    latest = JSON.parse(event.data);
    if (!busy) catchUp();
  };
  source.onopen = () => {
    lost = false;
    drawProgress();
  };
  source.onerror = () => {
    lost = true;
    drawProgress();
  };
  setInterval(drawProgress, 5000); // the ages grow between updates

  // Updates that arrive while an earlier one is drawn replace each other.
  async function catchUp() {
    busy = true;
    while (latest) {
      const now = latest;
      latest = null;
      try {
        await update(now);
      } catch {
        /* the server has ended, or the run is being replaced: wait for the next update */
      }
      await new Promise((done) => {
        setTimeout(done, 500);
      });
    }
    busy = false;
  }

  async function update(now) {
    const changed = Object.keys(now.versions).filter((name) => versions[name] !== now.versions[name]);
    const fresh = {};
    for (const name of changed) fresh[name] = await fetchPart(name);
    Object.assign(parts, fresh);
    Object.assign(versions, now.versions);
    now.status.forEach((status, at) => {
      if (parts.main.runs[at]) parts.main.runs[at].status = status;
    });
    if (changed.length) refresh();
    else drawProgress();
  }
}
