// Renders an answer: items as a table or as tiles, changes of rank compared with another answer, and the time of each
// step.

const as_cards = { chosen: false };

// Rank of each item in another answer, by id.
const ranks = answer => new Map((answer?.items ?? []).map((item, rank) => [item.id, rank]));

function moved(rank, before) {
  if (before === undefined) return make("span", { class: "moved good" }, "new");
  const by = before - rank;
  return make("span", { class: `moved ${by > 0 ? "good" : by < 0 ? "bad" : "muted"}` }, by > 0 ? `▲ ${by}` : by < 0 ? `▼ ${-by}` : "=");
}

// Display name of an item: its first text column, or its id.
function title_of(item) {
  const name = item.columns?.[name_column()];
  return name === undefined || name === null ? `#${item.id}` : cell(name);
}

function item_table(answer, other) {
  const tasks = Object.keys(answer.items[0]?.tasks ?? {}), columns = Object.keys(answer.items[0]?.columns ?? {}), before = ranks(other);
  const head = ["", ...(other ? ["moved"] : []), "id", ...columns, "score", "similarity", ...tasks];
  const rows = answer.items.map((item, rank) => [rank + 1, ...(other ? [moved(rank, before.get(item.id))] : []), String(item.id), ...columns.map(name => cell(item.columns[name])), item.score, item.similarity, ...tasks.map(name => item.tasks[name])]);
  return table(head, rows, "Items");
}

function item_cards(answer, other) {
  const before = ranks(other), tasks = Object.keys(answer.items[0]?.tasks ?? {});
  const most = Object.fromEntries(tasks.map(name => [name, Math.max(...answer.items.map(item => item.tasks[name]), 1e-12)]));
  return make("ul", { class: "cards" }, answer.items.map((item, rank) => {
    const others = Object.entries(item.columns ?? {}).filter(([name]) => name !== name_column());
    return make("li", { class: "panel" },
      make("h3", {}, `${rank + 1}. ${title_of(item)} `, other ? moved(rank, before.get(item.id)) : null),
      make("div", { class: "muted" }, `#${item.id}`, others.map(([name, value]) => ` · ${name} ${cell(value)}`)),
      make("dl", {}, [["score", item.score], ["similarity", item.similarity]].map(([name, value]) => [make("dt", {}, name), make("dd", {}), make("dd", {}, short(value))]).flat(),
        tasks.map(name => [make("dt", {}, name), make("dd", {}, make("span", { class: "bar", style: `width:${(100 * Math.max(item.tasks[name], 0) / most[name]).toFixed(1)}%` })), make("dd", {}, short(item.tasks[name]))]).flat()));
  }));
}

// One answer under its title; `other` is the answer to compare with.
function answer_panel({ title, call, body, answer }, other) {
  const panel = make("div", { class: "panel answer" }, make("h2", {}, title));
  if (!answer.ok) return put(panel, {}, [problem(answer, body.filter)]);
  const { content } = answer, items = make("div", {});
  const show = () => items.replaceChildren(!content.items.length ? make("p", {}, "No item is eligible.") : (as_cards.chosen ? item_cards : item_table)(content, other));
  const toggle = make("button", { type: "button", "aria-pressed": as_cards.chosen, onclick: () => { as_cards.chosen = !as_cards.chosen; render_answers(); } }, as_cards.chosen ? "as a table" : "as tiles");
  show();
  const gone = other ? other.items.filter(item => !ranks(content).has(item.id)) : [];
  const { explain } = content;
  const command = `curl ${location.origin}${call} --json '${written(body).replaceAll("'", "'\\''")}'`;
  return put(panel, {}, [
    make("p", { class: "muted" }, `version ${content.version} (${content.digest}), position ${whole(content.position)}, ${answer.ms.toFixed(1)} ms here, ${bytes(answer.bytes)}, coverage ${percent(content.coverage)} `, toggle),
    items,
    gone.length ? make("p", { class: "muted" }, `No longer here: ${gone.map(title_of).join(", ")}`) : null,
    explain ? make("details", { open: true }, make("summary", {}, "Time by step"), waterfall(explain.steps), funnel(explain, shown.model.items), make("p", { class: "muted" }, notes(explain))) : null,
    make("details", {}, make("summary", {}, "Request and answer"), make("pre", { tabindex: 0 }, command), make("pre", { tabindex: 0 }, written(content, 1))),
  ]);
}

function notes(explain) {
  const said = [`route ${explain.route}`, `kernel ${explain.kernel}`, `${whole(explain.probed)} lists probed`];
  if (explain.probes) said.push(`${whole(explain.probes.probes ?? explain.probes)} planned${explain.probes.target ? ` for recall ${explain.probes.target}` : ""}${explain.probes.estimate ? `, measured there ${explain.probes.estimate}` : ""}`);
  if (explain.filter) said.push(`filter ${explain.filter}`);
  return said.join(" · ");
}
