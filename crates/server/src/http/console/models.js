// Versions: published, loaded and active ones, and labels.

async function refresh_versions() {
  const answer = await ask(`${base()}/versions`);
  if (!answer.ok) return at("versions").replaceChildren(problem(answer));
  shown.versions = answer.content.versions;
  shown.desired = answer.content.desired ?? null;
  build_beside();
  render_versions();
  await refresh_traffic();
}

async function change(path, method, body) {
  at("page-models").querySelectorAll("button").forEach(button => button.disabled = true);
  const answer = await ask(base() + path, { method, body });
  await refresh();
  // `refresh` has replaced the disabled buttons by enabled ones.
  at("trouble").replaceChildren(...(answer.ok ? [] : [problem(answer)]));
}

// Confirms the activation of a version and its scope.
function activate(version) {
  const path = `/versions/${version}:activate`;
  const scopes = [["server", "this server, until another version is published or desired"], ...(shown.desired ? [["store", "all servers of the store"]] : [])];
  const boxes = scopes.map(([value, text], n) => make("label", { class: "choice" }, make("input", { type: "radio", name: "scope", value, checked: n === 0 }), text));
  const confirm = () => {
    const scope = dialog.querySelector("input:checked").value;
    dialog.close();
    change(scope === "store" ? `${path}?scope=store` : path, "POST");
  };
  const dialog = make("dialog", { "aria-label": "Activate a version", onclose: () => dialog.remove() },
    make("h2", {}, `Activate version ${version} of ${shown.model.name}?`), make("div", {}, "At:", boxes),
    make("div", { class: "row" }, make("button", { type: "button", class: "main", onclick: confirm }, "Activate"), make("button", { type: "button", onclick: () => dialog.close() }, "Cancel")));
  document.body.append(dialog);
  dialog.showModal();
}

// Desired state of the store, and how this server differs from it.
function desired_state() {
  const { desired, versions } = shown;
  if (!desired) return [];
  const newest = Math.max(...versions.filter(version => version.published).map(version => version.version));
  const answers = versions.find(version => version.active)?.version;
  const name = desired.version === undefined ? `the newest version${versions.length ? ` (${newest})` : ""}` : `version ${desired.version}`;
  const astray = Object.entries(desired.labels ?? {}).filter(([label, version]) => !versions.find(one => one.version === version)?.labels.includes(label));
  const wrong = [desired.stands ? null : `this server answers with ${answers === undefined ? "none" : `version ${answers}`}`, ...astray.map(([label, version]) => `label ${label} does not point to version ${version} here`)].filter(Boolean);
  const said = `Desired in the store: ${name} answers.`;
  return [wrong.length ? make("div", { class: "problem", role: "status" }, `${said} It differs: ${wrong.join("; ")}.`) : make("p", { class: "muted" }, said)];
}

function render_versions() {
  const act = (text, path, method = "POST") => make("button", { type: "button", onclick: () => change(path, method) }, text);
  const rows = [...shown.versions].reverse().map(version => {
    const path = `/versions/${version.version}`;
    const state = [version.active && "answers", version.loaded && !version.active && "in memory", version.published ? null : "no longer published"].filter(Boolean).join(", ") || "published";
    const labels = version.labels.map(label => make("span", { class: "inline" }, label, make("button", { type: "button", "aria-label": `remove the label ${label}`, onclick: () => change(`/labels/${encodeURIComponent(label)}`, "DELETE") }, "×")));
    const label = make("input", { type: "text", size: 8, "aria-label": `new label of version ${version.version}` });
    const give = make("button", { type: "button", onclick: () => label.value && change(`/labels/${encodeURIComponent(label.value)}`, "PUT", { version: version.version }) }, "label");
    const actions = make("div", { class: "row" }, version.active ? null : make("button", { type: "button", onclick: () => activate(version.version) }, "activate"), version.loaded ? null : act("load", `${path}:load`), version.loaded && !version.active ? act("unload", `${path}:unload`) : null, version.loaded ? [label, give] : null);
    const refused = version.refused ? make("div", { class: "problem" }, `rejected ${version.attempts} times: ${version.refused}${version.retry_in_ms === undefined ? "" : `; tried again in ${(version.retry_in_ms / 1000).toFixed(0)} s`}`) : "";
    return [make("strong", {}, String(version.version)), make("span", { class: version.active ? "good" : null }, state), version.digest ?? "", make("div", { class: "row" }, labels), actions, refused];
  });
  const listed = table(["version", "state", "digest", "labels", "", ""], rows, "Versions");
  listed.classList.add("stack");
  at("versions").replaceChildren(...desired_state(), listed);
}
