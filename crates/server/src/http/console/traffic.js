// Traffic: canary and shadow of a model.

async function refresh_traffic() {
  const answer = await ask(`${base()}/traffic`);
  // Hidden if the traffic is unknown, for example if the servers of a router report different settings.
  at("traffic").hidden = !answer.ok;
  if (answer.ok) render_traffic(answer.content);
}

async function wish_traffic(now, part, setting) {
  const body = { revision: now.revision };
  for (const name of ["canary", "shadow"]) {
    const wished = name === part ? setting : now[name]?.setting;
    if (wished) body[name] = wished;
  }
  await change("/traffic", "PUT", body);
}

// Setting of a rolled-back canary with a new share, without the record of its rollback.
const renewed = ({ stopped, ...setting }, share) => ({ ...setting, share });

function traffic_form(now, part, what) {
  const set = now[part];
  const others = shown.versions.filter(version => version.published && !version.active).map(version => version.version).reverse();
  const version = make("select", { "aria-label": `version of the ${part}` }, others.map(number => make("option", { value: number, selected: number === set?.setting.version }, String(number))));
  const share = make("input", { type: "number", min: 0, max: 100, step: "any", size: 5, value: set ? +(set.setting.share * 100).toPrecision(6) : 5, "aria-label": `share of the ${part} in percent` });
  const give = () => {
    const number = Number(version.value);
    const kept = set && (set.setting.label !== undefined || set.setting.version === number) ? set.setting : { version: number };
    return version.value && wish_traffic(now, part, renewed(kept, Number(share.value) / 100));
  };
  const end = make("button", { type: "button", "aria-label": `end the ${part}`, onclick: () => wish_traffic(now, part, null) }, "end");
  const target = set ? set.setting.label ?? `version ${set.setting.version}` : "none";
  const state = set ? `${part}: ${target}, ${percent(set.share ?? set.setting.share)} ${what}${set.serving === undefined ? ", not in memory or active" : ""}` : `no ${part}`;
  return make("div", { class: "row" }, make("span", {}, state), others.length ? [version, make("label", { class: "inline" }, share, "%"), make("button", { type: "button", "aria-label": `set the ${part}`, onclick: give }, "set")] : null, set ? end : null);
}

function render_traffic(now) {
  const parts = [make("h2", {}, "Traffic"), traffic_form(now, "canary", "of keys"), traffic_form(now, "shadow", "of requests")];
  if (now.canary) {
    const row = (name, seen) => [name, seen.requests, seen.errors, seen.p50_ms ?? "", seen.p99_ms ?? "", seen.audits, seen.recall === undefined ? "" : seen.recall.toFixed(3)];
    parts.push(table(["", "requests", "failed", "p50 ms", "p99 ms", "audits", "recall"], [row("active", now.canary.seen_active), row("canary", now.canary.seen_canary)], "Canary"));
    const { stopped } = now.canary.setting;
    if (stopped) parts.push(make("div", { class: "problem", role: "alert" }, `rolled back at ${stopped.time}, from ${percent(stopped.share)}: ${stopped.reason}`));
  }
  at("traffic").replaceChildren(...parts);
}
