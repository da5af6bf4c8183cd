// Index, columns, tables and shards.

async function render_index() {
  const { model } = shown, answer = await ask(`${base()}/index`);
  if (!answer.ok) return at("shape").replaceChildren(problem(answer));
  const { content } = answer, mean = (content.items - content.fresh_items) / Math.max(content.lists, 1);
  const panels = [
    make("div", { class: "panel" }, make("h3", {}, "Index"), table(null, [["items", whole(content.items)], ["delta", whole(content.fresh_items)], ["slots", whole(content.slots)], ["lists", whole(content.lists)], ["items of a list, mean", short(mean)], ["largest list", `${whole(content.list_items.at(-1) ?? 0)} (${short((content.list_items.at(-1) ?? 0) / Math.max(mean, 1e-9))} × the mean)`], ["planned memory", bytes(model.memory_bytes)], ["position of updates", whole(content.position)], ["recall calibrated by", model.calibration ? `${whole(model.calibration.queries)} queries: ${model.calibration.source}` : "nothing"]], "Index")),
    lines("Items of a list, by percentile of lists", [{ name: "items", points: content.list_items.map((items, n) => [n, items]) }], { x_text: n => `${n} %` }),
    bars("Files", [...content.files].sort((a, b) => b.bytes - a.bytes).slice(0, 14).map(file => [file.name, file.bytes, bytes(file.bytes)])),
  ];
  const curves = (model.calibration?.curves ?? []).filter(curve => curve.pass_rate === 1);
  if (curves.length) panels.push(lines("Recall by probed lists, without a filter", curves.map(curve => ({ name: `K0 = ${whole(curve.k)}`, points: curve.probes.map((probes, n) => [probes, curve.recall[n]]) })), { log_x: true }));
  at("shape").replaceChildren(...panels);
  const button = column => make("button", { type: "button", onclick: () => render_values(column) }, column.name);
  at("attributes").replaceChildren(table(["column", "kind", "distinct", "filters"], model.columns.map(column => [button(column), column.kind, column.distinct ?? "", column.filter ? "yes" : "no"]), "Columns"));
  at("values").replaceChildren();
  at("browser").replaceChildren(...item_browser());
}

// One item with all of its attributes, found by name or id.
function item_browser() {
  const found = make("div", { role: "status" });
  const show = async id => {
    const answer = await ask(`${base()}/items/${id}`);
    found.replaceChildren(answer.ok ? table(["column", "value"], [["id", String(answer.content.id)], ...Object.entries(answer.content.attributes).map(([name, value]) => [name, cell(value)])], `Item ${id}`) : problem(answer));
  };
  const box = combo(name_column() ? "name or id of an item" : "id of an item", text => items_like(text), ({ value, text }, input) => { input.value = text; show(value); });
  box.querySelector("input").addEventListener("keydown", event => {
    const text = event.target.value.trim();
    if (event.key === "Enter" && !event.defaultPrevented && is_whole(text)) show(text);
  });
  return [make("p", { class: "muted" }, `By ${box.firstChild.getAttribute("aria-label")}.`), box, found];
}

async function render_values(column) {
  const answer = await ask(`${base()}/columns/${encodeURIComponent(column.name)}?limit=30`);
  if (!answer.ok) return at("values").replaceChildren(problem(answer));
  const { values, found, least, greatest } = answer.content;
  // Numbers without thousands separators, as in a filter: many are years, times or ids.
  const bound = value => typeof value === "number" && !Number.isInteger(value) ? String(+value.toPrecision(6)) : String(value);
  const range = least === undefined ? "" : `, from ${bound(least)} to ${bound(greatest)}`;
  const title = `${column.name}: ${column.kind === "floats" ? "numbers" : `${whole(found)} values`}${range}`;
  at("values").replaceChildren(values.length ? bars(title, values.map(({ value, items }) => [String(value), items ?? 0, items === undefined ? "" : `${whole(items)} (${percent(items / shown.model.items)})`])) : make("p", {}, title));
  at("values").scrollIntoView({ block: "nearest" });
}

// Draws each table as an area: the width shows the bytes of its rows, the colour their location.
function render_tables() {
  const { tables } = shown.model;
  if (!tables.length) return at("plan").replaceChildren(make("p", {}, "This model has no tables: requests have vectors."));
  const sized = [...tables].sort((a, b) => b.bytes - a.bytes);
  const picture = areas("Tables", sized.map(({ name, bytes: size, placed }) => ({ name, size, kind: placed, text: bytes(size) })));
  const rows = sized.map(({ name, rows, width, format, placed, bytes: size }) => [name, rows, width, format, bytes(size), placed]);
  at("plan").replaceChildren(picture, table(["table", "rows", "width", "format", "bytes", "where"], rows, "Tables"));
}

async function render_shards() {
  const [answer, updates] = await Promise.all([ask(`${base()}/shards`), ask(`${base()}/items:position`)]);
  if (!answer.ok) return at("shards").replaceChildren(problem(answer));
  const { shards, version, coverage } = answer.content, all = shards.reduce((sum, { items }) => sum + items, 0);
  const seen = updates.ok ? updates.content.shards ?? [updates.content] : [];
  const state = servers => servers ? `${whole(servers)} ${servers > 1 ? "servers" : "server"}` : "no server";
  const rows = shards.map(({ shard, items, servers }, n) => {
    const had = make("span", { class: servers ? "good" : "bad" }, state(servers)), { fresh_items, position, durable } = seen[n] ?? {};
    return [make("strong", {}, String(shard)), whole(items), percent(items / Math.max(all, 1)), had, fresh_items, position, position === undefined ? undefined : durable - position];
  });
  const said = make("p", { class: coverage < 1 ? "bad" : null }, `Version ${version}: ${percent(coverage)} of its items are at a server.`);
  at("shards").replaceChildren(said, areas("Shards", shards.map(({ shard, items, servers }) => ({ name: `shard ${shard}`, size: items, kind: state(servers), text: `${whole(items)} items` }))),
    table(["shard", "items", "share", "servers", "delta", "position", "not visible yet"], rows, "Shards"));
}
