// Which page is shown, and the start.
const PAGES = { query: () => {}, models: () => refresh_versions(), live: () => read_metrics(), index: () => render_index(), tables: () => render_tables() };
const page = () => PAGES[location.hash.slice(1)] ? location.hash.slice(1) : "query";

function show_page() {
  for (const name of Object.keys(PAGES)) at(`page-${name}`).hidden = name !== page();
  for (const link of document.querySelectorAll("nav a")) link.toggleAttribute("aria-current", link.hash === `#${page()}`);
  at("trouble").replaceChildren();
  if (shown.model) PAGES[page()]();
}

function choose(name) {
  const model = shown.models.find(model => model.name === name) ?? shown.models[0];
  const is_other = shown.model?.name !== model.name || shown.model.digest !== model.digest;
  shown.model = model;
  at("about").textContent = `${model.description} ${model.name}, version ${model.version}: ${whole(model.items)} items in ${whole(model.lists)} lists, ${whole(model.dimension)} wide.`;
  if (is_other) build_form();
}

async function refresh() {
  const answer = await ask("/v1/models");
  if (!answer.ok || !answer.told.models.length) {
    at("trouble").replaceChildren(answer.ok ? make("p", {}, "No model is loaded yet. Publish one: sterling publish --package …") : problem(answer));
    return false;
  }
  shown.models = answer.told.models;
  const chosen = at("model").value;
  at("model").replaceChildren(...shown.models.map(model => make("option", { value: model.name }, model.name)));
  at("model").value = shown.models.some(model => model.name === chosen) ? chosen : shown.models[0].name;
  choose(at("model").value);
  await refresh_versions();
  return true;
}

async function health() {
  const answer = await ask("/readyz");
  at("health").className = answer.ok ? "good" : "bad";
  at("health").textContent = answer.ok ? "ready" : answer.told.detail ?? "not ready";
}

at("form").addEventListener("submit", event => { event.preventDefault(); send(); });
at("beside").addEventListener("input", () => { if (answers.length) send(); });
at("model").addEventListener("input", () => { choose(at("model").value); refresh_versions(); show_page(); });
addEventListener("hashchange", () => { show_page(); at("main").focus(); });
setInterval(() => { if (!document.hidden && shown.model && page() === "live") read_metrics(); }, STEP_MS);
setInterval(async () => { if (document.hidden) return; await health(); if (!shown.model && await refresh()) show_page(); }, 5000);

await health();
await refresh();
show_page();
