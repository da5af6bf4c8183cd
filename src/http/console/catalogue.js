// The index, the columns, the tables.

async function render_index() {
  const { model } = shown, answer = await ask(`${base()}/index`);
  if (!answer.ok) return at("shape").replaceChildren(problem(answer));
  const { told } = answer, mean = (told.items - told.fresh_items) / Math.max(told.lists, 1);
  const panels = [
    make("div", { class: "panel" }, make("h3", {}, "Index"), table(null, [["items", whole(told.items)], ["beside the snapshot", whole(told.fresh_items)], ["slots", whole(told.slots)], ["lists", whole(told.lists)], ["items of a list, mean", short(mean)], ["largest list", `${whole(told.list_items.at(-1) ?? 0)} (${short((told.list_items.at(-1) ?? 0) / Math.max(mean, 1e-9))} × the mean)`], ["planned memory", bytes(model.memory_bytes)], ["position of updates", whole(told.position)]], "Index")),
    lines("Items of a list, by percentile of lists", [{ name: "items", points: told.list_items.map((items, n) => [n, items]) }], { x_text: n => `${n} %` }),
    bars("Files", [...told.files].sort((a, b) => b.bytes - a.bytes).slice(0, 14).map(file => [file.name, file.bytes, bytes(file.bytes)])),
  ];
  const curves = (model.calibration?.curves ?? []).filter(curve => curve.pass_rate === 1);
  if (curves.length) panels.push(lines("Recall by probed lists, without a filter", curves.map(curve => ({ name: `K0 = ${whole(curve.k)}`, points: curve.probes.map((probes, n) => [probes, curve.recall[n]]) })), { log_x: true }));
  at("shape").replaceChildren(...panels);
  const button = column => make("button", { type: "button", onclick: () => render_values(column) }, column.name);
  at("attributes").replaceChildren(table(["column", "kind", "distinct", "filters"], model.columns.map(column => [button(column), column.kind, column.distinct, column.filter ? "yes" : "no"]), "Columns"));
  at("values").replaceChildren();
}

async function render_values(column) {
  const answer = await ask(`${base()}/columns/${encodeURIComponent(column.name)}?limit=30`);
  if (!answer.ok) return at("values").replaceChildren(problem(answer));
  const { values, found, least, greatest } = answer.told;
  const range = least === undefined ? "" : `, from ${short(least)} to ${short(greatest)}`;
  const title = `${column.name}: ${column.kind === "floats" ? "numbers" : `${whole(found)} values`}${range}`;
  at("values").replaceChildren(values.length ? bars(title, values.map(({ value, items }) => [String(value), items ?? 0, items === undefined ? "" : `${whole(items)} (${percent(items / shown.model.items)})`])) : make("p", {}, title));
  at("values").scrollIntoView({ block: "nearest" });
}

// Each table as an area of the bytes of its rows, by where it lies.
function render_tables() {
  const { tables } = shown.model;
  if (!tables.length) return at("plan").replaceChildren(make("p", {}, "This model has no tables: requests bring vectors."));
  const sized = [...tables].sort((a, b) => b.bytes - a.bytes);
  const all = sized.reduce((sum, table) => sum + table.bytes, 0) || 1, places = [...new Set(sized.map(table => table.placed))];
  const picture = draw("svg", { viewBox: "0 0 1000 120", role: "img", "aria-label": `Tables: ${sized.map(table => `${table.name} ${bytes(table.bytes)}`).join(", ")}` });
  let left = 0;
  for (const table of sized) {
    const wide = 1000 * table.bytes / all;
    picture.append(draw("rect", { x: left, y: 10, width: Math.max(wide - 2, 1), height: 80, fill: color(places.indexOf(table.placed)), opacity: .85 }, draw("title", {}, `${table.name}: ${bytes(table.bytes)}, ${table.placed}`)));
    if (wide > 60) picture.append(draw("text", { x: left + 4, y: 108 }, table.name));
    left += wide;
  }
  const rows = sized.map(({ name, rows, width, format, placed, bytes: size }) => [name, rows, width, format, bytes(size), placed]);
  at("plan").replaceChildren(make("div", { class: "panel" }, picture, legend(places)), table(["table", "rows", "width", "format", "bytes", "where"], rows, "Tables"));
}
