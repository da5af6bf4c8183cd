// Query page: a form for the model's schema, and one or two answers.
let form = null, answers = [], running = null;

function user_part() {
  if (form.vector) return { vector: form.vector.value() };
  return { features: Object.fromEntries(form.features.map(field => [field.name, field.value()]).filter(([, value]) => value.length)) };
}

function build_form() {
  const { model } = shown;
  form = { features: model.features.map(feature_field) };
  if (!model.features.length) form.vector = numbers("vector", model.dimension * Math.max(1, model.queries?.length ?? 1));
  const ids = model.features.find(feature => feature.kind === "ids");
  const surprise = ids && name_column() ? make("button", { type: "button", onclick: some_items }, "Take three items") : null;
  at("features").replaceChildren(...(form.vector ? [form.vector.element] : form.features.map(field => field.element)), ...(surprise ? [surprise] : []));

  form.filter = filter_field();
  at("filter").replaceChildren(form.filter.element);

  const number = (label, value, attributes) => { const input = make("input", { type: "number", value, ...attributes, oninput: after(200, () => changed()) }); return { element: make("label", { class: "inline" }, label, input), value: () => input.value === "" ? undefined : Number(input.value) }; };
  form.k = number("k", 10, { min: 1, max: 100000, title: "Items to return." });
  form.candidates = number("candidates", "", { min: 1, max: 200000, placeholder: model.candidates, title: "Items that the search hands to the reranker." });
  form.recall = slider("recall", model.recall, { least: .5, most: .999, step: .001, tell: () => changed(), help: "Share of the true best candidates that the search should find; a higher share probes more lists." });
  form.exact = make("input", { type: "checkbox", oninput: () => changed() });
  form.leave_out = make("input", { type: "checkbox", checked: true, oninput: () => changed() });
  at("search").replaceChildren(form.k.element, form.candidates.element, form.recall.element, make("label", { class: "inline", title: "Scan all lists." }, form.exact, "exact"),
    ...(ids ? [make("label", { class: "inline" }, form.leave_out, "exclude the user's items")] : []));

  form.columns = model.columns.map((column, n) => ({ name: column.name, box: make("input", { type: "checkbox", checked: n < 2, oninput: () => changed() }) }));
  at("columns").replaceChildren(make("span", { class: "muted" }, "columns"), ...form.columns.map(({ name, box }) => make("label", { class: "inline" }, box, name)));

  form.constants = Object.entries(model.constants).map(([name, value]) => ({ name, usual: value, ...slider(name, value, { tell: () => changed() }) }));
  at("expression").textContent = model.value;
  at("constants").replaceChildren(...form.constants.map(constant => constant.element));
  at("value").hidden = !form.constants.length;
  answers = [];
  render_answers();
}

async function some_items() {
  const letter = String.fromCharCode(97 + Math.floor(Math.random() * 26));
  const found = await items_like(letter, 50), picked = found.sort(() => Math.random() - .5).slice(0, 3);
  form.features.find(field => field.kind === "ids").set(picked.map(({ value, text }) => ({ value, text })));
  send();
}

function build_beside() {
  const others = shown.versions.filter(version => version.loaded && !version.active).map(({ version }) => make("option", { value: `version:${version}` }, `version ${version}`));
  at("beside").replaceChildren(make("option", { value: "" }, "nothing"), make("option", { value: "exact" }, "the exact answer"), make("option", { value: "last" }, "the previous answer"), ...others);
}

function body_of() {
  const body = { ...user_part(), filter: form.filter.value(), k: form.k.value() ?? 10, explain: true };
  body.columns = form.columns.filter(({ box }) => box.checked).map(({ name }) => name);
  if (form.candidates.value()) body.candidates = form.candidates.value();
  if (form.exact.checked) body.exact = true;
  else if (form.recall.value() !== shown.model.recall) body.recall = form.recall.value();
  const ids = form.features.find(field => field.kind === "ids");
  if (ids && form.leave_out.checked && ids.value().length) body.exclude = ids.value();
  const constants = form.constants.filter(constant => constant.value() !== undefined && constant.value() !== constant.usual);
  if (constants.length) body.constants = Object.fromEntries(constants.map(constant => [constant.name, constant.value()]));
  return body;
}

async function run(title, call, body, signal) {
  return { title, call, body, answer: await ask(call, { method: "POST", body, signal }) };
}

async function send() {
  let body;
  try { body = body_of(); } catch (error) {
    at("status").textContent = `A list of numbers is not one: ${error.message}`;
    return;
  }
  running?.abort();
  running = new AbortController();
  const { signal } = running, beside = at("beside").value, before = answers.at(-1);
  at("status").textContent = "asking…";
  const asked = [run("Answer", `${base()}:retrieve`, body, signal)];
  if (beside === "exact") asked.unshift(run("Exact", `${base()}:retrieve`, { ...body, exact: true, recall: undefined }, signal));
  if (beside.startsWith("version:")) asked.unshift(run(`Version ${beside.slice(8)}`, `${base()}/versions/${beside.slice(8)}:retrieve`, body, signal));
  const got = await Promise.all(asked);
  if (got.some(({ answer }) => answer.aborted)) return;
  answers = beside === "last" && before ? [{ ...before, title: "Before" }, ...got] : got;
  render_answers();
}

function render_answers() {
  const [first, second] = answers, reference = second && first.answer.ok ? first.answer.content : null;
  at("answers").className = answers.length > 1 ? "grid" : "";
  at("answers").replaceChildren(...answers.map((one, n) => answer_panel(one, n === 1 ? reference : null)));
  if (!answers.length) return at("status").replaceChildren();
  const main = answers.at(-1).answer, said = main.ok ? `${whole(main.content.items.length)} items` : "rejected";
  const shared = reference && main.ok ? main.content.items.filter(item => ranks(reference).has(item.id)).length : null;
  const of = Math.max(reference?.items.length ?? 0, 1);
  at("status").textContent = shared === null ? said : `${said}, ${whole(shared)} of the ${whole(reference.items.length)} in the other answer${answers[0].title === "Exact" ? `: recall ${short(shared / of)}` : ""}`;
}

// After the first answer, each change of the form sends the request again.
const changed = after(150, () => { if (answers.length) send(); });
