// Versions: what is published and in memory, which one answers, labels.

async function refresh_versions() {
  const answer = await ask(`${base()}/versions`);
  if (!answer.ok) return at("versions").replaceChildren(problem(answer));
  shown.versions = answer.told.versions;
  build_beside();
  render_versions();
  await refresh_traffic();
}

async function change(path, method, body) {
  at("page-models").querySelectorAll("button").forEach(button => button.disabled = true);
  const answer = await ask(base() + path, { method, body });
  at("trouble").replaceChildren(...(answer.ok ? [] : [problem(answer)]));
  await refresh();
}

function render_versions() {
  const act = (text, path, method = "POST") => make("button", { type: "button", onclick: () => change(path, method) }, text);
  const rows = [...shown.versions].reverse().map(version => {
    const path = `/versions/${version.version}`;
    const state = [version.active && "answers", version.loaded && !version.active && "in memory", version.published ? null : "no longer published"].filter(Boolean).join(", ") || "published";
    const labels = version.labels.map(label => make("span", { class: "inline" }, label, make("button", { type: "button", "aria-label": `take the label ${label} away`, onclick: () => change(`/labels/${encodeURIComponent(label)}`, "DELETE") }, "×")));
    const label = make("input", { type: "text", size: 8, "aria-label": `new label of version ${version.version}` });
    const give = make("button", { type: "button", onclick: () => label.value && change(`/labels/${encodeURIComponent(label.value)}`, "PUT", { version: version.version }) }, "label");
    const actions = make("div", { class: "row" }, version.active ? null : act("activate", `${path}:activate`), version.loaded ? null : act("load", `${path}:load`), version.loaded && !version.active ? act("unload", `${path}:unload`) : null, version.loaded ? [label, give] : null);
    const refused = version.refused ? make("div", { class: "problem" }, `refused ${version.attempts} times: ${version.refused}${version.retry_in_ms === undefined ? "" : `; tried again in ${(version.retry_in_ms / 1000).toFixed(0)} s`}`) : "";
    return [make("strong", {}, String(version.version)), make("span", { class: version.active ? "good" : null }, state), version.digest ?? "", make("div", { class: "row" }, labels), actions, refused];
  });
  at("versions").replaceChildren(table(["version", "state", "digest", "labels", "", ""], rows, "Versions"));
}
