// Selects the page, and starts the console.
const PAGES = { query: () => {}, models: () => refresh_versions(), live: () => read_metrics(), index: () => render_index(), tables: () => render_tables(), shards: () => render_shards() };
const page = () => PAGES[location.hash.slice(1)] ? location.hash.slice(1) : "query";

function show_page() {
  for (const name of Object.keys(PAGES)) at(`page-${name}`).hidden = name !== page();
  for (const link of document.querySelectorAll("nav a")) link.toggleAttribute("aria-current", link.hash === `#${page()}`);
  at("trouble").replaceChildren();
  if (shown.model) PAGES[page()]();
}

function choose(name) {
  const model = shown.models.find(model => model.name === name) ?? shown.models[0];
  // Keeps the entered values if the other version has the same inputs.
  const schema = of => of && JSON.stringify([of.name, of.features, of.queries, of.columns.map(column => column.name), of.constants, of.candidates, of.recall]);
  const is_other = schema(shown.model) !== schema(model);
  shown.model = model;
  at("about").textContent = `${model.description} ${model.name}, version ${model.version}: ${whole(model.items)} items in ${whole(model.lists)} lists, ${whole(model.dimension)} wide.`;
  if (is_other) build_form();
}

async function refresh_models() {
  const answer = await ask("/v1/models"), is_there = answer.ok && answer.content.models.length > 0;
  const unavailable = answer.ok ? (answer.content.unavailable ?? []).map(model => make("p", {}, `${model.name}: ${model.reason}`)) : [problem(answer)];
  at("absent").replaceChildren(...(is_there || unavailable.length ? unavailable : [make("p", {}, "No model is loaded yet; `sterling publish` makes one.")]));
  if (!is_there) return false;
  const names = models => models.map(model => model.name).join("\n"), chosen = at("model").value;
  if (names(shown.models) !== names(answer.content.models)) at("model").replaceChildren(...answer.content.models.map(model => make("option", { value: model.name }, model.name)));
  shown.models = answer.content.models;
  at("model").value = shown.models.some(model => model.name === chosen) ? chosen : shown.models[0].name;
  choose(at("model").value);
  return true;
}

const refresh = async () => await refresh_models() && (await refresh_versions(), true);

async function health() {
  const answer = await ask("/readyz");
  const lines = answer.ok ? String(answer.content).split("\n") : [];
  const warnings = lines.filter(line => line.startsWith("warning: ")).map(line => line.replace("warning: ", ""));
  at("health").className = answer.ok && !warnings.length ? "good" : "bad";
  at("health").textContent = answer.ok ? (warnings.length ? "ready, with warnings" : "ready") : "not ready";
  at("warnings").replaceChildren(...(answer.ok ? warnings.map(warning => make("p", { class: "problem" }, warning)) : [problem(answer)]));
}

at("unlock").addEventListener("submit", async event => {
  event.preventDefault();
  sessionStorage.setItem(KEY, at("key").value);
  at("unlock").hidden = true;
  if (await refresh()) { at("key").value = ""; show_page(); }
});
at("form").addEventListener("submit", event => { event.preventDefault(); send(); });
at("beside").addEventListener("change", () => { if (answers.length) send(); });
at("model").addEventListener("change", () => { choose(at("model").value); refresh_versions(); show_page(); });
addEventListener("hashchange", () => { show_page(); at("main").focus(); });
await health();
await refresh();
show_page();
// Also runs while another page is shown, so that charts have a history.
setInterval(() => { if (!document.hidden && shown.model) read_metrics(); }, STEP_MS);
setInterval(async () => {
  if (document.hidden) return;
  await health();
  const is_first = !shown.model;
  if (!is_first && page() === "shards") render_shards();
  if (await refresh_models() && is_first) { await refresh_versions(); show_page(); }
}, 5000);
