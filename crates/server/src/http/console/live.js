// Live metrics of the server: differences between readings every 2 s.
const STEP_MS = 2000, KEPT = 150, STEPS = 4;
const series = new Map();
const drawn_steps = [];
let last = null;

// Parses Prometheus' text format to [{name, labels, value}].
function samples(text) {
  return text.split("\n").filter(line => line && line[0] !== "#").map(line => {
    const [, name, labels = "", value] = line.match(/^(\w+)(?:\{(.*)\})? (\S+)/) ?? [];
    return { name, labels: Object.fromEntries([...labels.matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)].map(([, key, text]) => [key, text])), value: Number(value) };
  });
}

const total = (all, name, matches = () => true) => all.filter(one => one.name === name && matches(one.labels)).reduce((sum, one) => sum + one.value, 0);

// Quantile of call times between two readings, from histogram buckets.
function quantile(now, before, name, matches, share) {
  const read = all => { const sums = new Map(); for (const one of all) if (one.name === `${name}_bucket` && matches(one.labels)) sums.set(one.labels.le, (sums.get(one.labels.le) ?? 0) + one.value); return sums; };
  const earlier = read(before), counts = [...read(now)].map(([le, count]) => [le === "+Inf" ? Infinity : Number(le), count - (earlier.get(le) ?? 0)]).sort((a, b) => a[0] - b[0]);
  const all = counts.at(-1)?.[1] ?? 0;
  if (!all) return NaN;
  const n = counts.findIndex(([, count]) => count >= share * all), [above, count] = counts[n], [below, fewer] = n ? counts[n - 1] : [0, 0];
  return above === Infinity ? below : below + (above - below) * (share * all - fewer) / Math.max(count - fewer, 1);
}

function keep(chart, name, time, value) {
  if (!series.has(chart)) series.set(chart, new Map());
  const lines = series.get(chart);
  if (!lines.has(name)) lines.set(name, []);
  lines.get(name).push([time, value]);
  if (lines.get(name).length > KEPT) lines.get(name).shift();
}

async function read_metrics() {
  const answer = await ask("/metrics");
  if (!answer.ok) return page() === "live" && at("charts").replaceChildren(problem(answer));
  const now = samples(answer.content), time = Date.now() / 1000;
  if (last) {
    const seconds = time - last.time, rate = (name, matches) => Math.max(0, (total(now, name, matches) - total(last.samples, name, matches)) / seconds);
    const passes = labels => ["retrieve", "rank", "embed"].includes(labels.call);
    keep("Answers per second", "200", time, rate("sterling_requests_total", labels => passes(labels) && labels.status === "200"));
    keep("Answers per second", "others", time, rate("sterling_requests_total", labels => passes(labels) && labels.status !== "200"));
    for (const [name, share] of [["p50", .5], ["p99", .99]]) keep("Latency of passes, ms", name, time, 1000 * quantile(now, last.samples, "sterling_request_seconds", passes, share));
    keep("Waiting requests", "waiting", time, total(now, "sterling_waiting_requests"));
    keep("Open connections", "open", time, total(now, "sterling_connections"));
    for (const reason of new Set(now.filter(one => one.name === "sterling_refused_total").map(one => one.labels.reason))) keep("Rejected per second", reason, time, rate("sterling_refused_total", labels => labels.reason === reason));
    keep("Memory of requests in flight, MB", "in flight", time, total(now, "sterling_in_flight_bytes") / 1e6);
    const steps = [...new Set(now.filter(one => one.name === "sterling_step_seconds_sum").map(one => one.labels.step))];
    const costs = steps.map(step => [step, total(now, "sterling_step_seconds_sum", labels => labels.step === step)]).filter(([, cost]) => cost > 0).sort((a, b) => b[1] - a[1]);
    // Steps that were drawn once stay drawn, so that each keeps its colour.
    for (const [step] of costs) if (drawn_steps.length < STEPS && !drawn_steps.includes(step)) drawn_steps.push(step);
    for (const step of drawn_steps) keep("Seconds per second, by step", step, time, rate("sterling_step_seconds_sum", labels => labels.step === step));
    if (drawn_steps.length) keep("Seconds per second, by step", "others", time, rate("sterling_step_seconds_sum", labels => !drawn_steps.includes(labels.step)));
    const hits = now.filter(one => /_cache_(hits|misses)_total$/.test(one.name));
    if (hits.length) {
      const hit = rate("sterling_cache_hits_total"), miss = rate("sterling_cache_misses_total");
      keep("Hit rate of row caches", "hits", time, hit + miss ? hit / (hit + miss) : NaN);
    }
  }
  const index = page() === "live" ? await ask(`${base()}/index`) : { ok: false };
  if (last && index.ok && index.content.durable !== undefined) {
    keep("Updates that are not visible yet", "lag", time, index.content.durable - index.content.position);
    keep("Items of the delta", "fresh", time, index.content.fresh_items);
  }
  last = { samples: now, time };
  // A chart under the pointer is not redrawn until the pointer leaves it.
  if (page() !== "live" || document.querySelector("#charts svg:hover")) return;
  const ago = x => `${Math.round(time - x)} s ago`;
  at("charts").replaceChildren(...[...series].map(([chart, named]) => lines(chart, [...named].map(([name, points]) => ({ name, points })), { x_text: ago })));
}
