// Filter editor: completes names and values, and marks errors.

// The term at the cursor as {start, column, value}; `value` is undefined before a colon.
function term_at(text, cursor) {
  const start = text.slice(0, cursor).search(/[^\s()!&|]*$/);
  const [column, ...rest] = text.slice(start, cursor).split(":");
  return { start, column, value: rest.length ? rest.join(":").replace(/^"/, "") : undefined };
}

const quoted = value => is_number(value) || /^[\w.+-]+$/.test(value) ? String(value) : JSON.stringify(value);

function filter_field() {
  const input = make("textarea", { rows: 2, spellcheck: "false", placeholder: "all items; for example " + example_filter() });
  const said = make("div", { role: "status", class: "muted" });
  const find = async (text, input) => {
    const { column, value } = term_at(text, input.selectionStart);
    if (value !== undefined) return shown.model.columns.some(c => c.name === column && c.filter && c.kind !== "floats") ? values_like(column, value) : [];
    const columns = shown.model.columns.filter(c => c.filter && c.name.startsWith(column));
    return column ? columns.map(c => ({ text: c.name, note: c.kind === "floats" ? "a number: < > =" : `${whole(c.distinct)} values`, value: c })) : [];
  };
  const take = (option, input) => {
    const { start, column, value } = term_at(input.value, input.selectionStart);
    const word = value === undefined ? option.text + (option.value.kind === "floats" ? " > " : ":") : `${column}:${quoted(option.value)} `;
    input.setRangeText(word, start, input.selectionStart, "end");
    input.dispatchEvent(new Event("input"));
  };
  const box = combo("filter", find, take, input);
  box.classList.add("filter");
  let turn = 0;
  const check = after(250, async () => {
    const mine = ++turn, filter = input.value;
    if (!filter.trim()) { said.replaceChildren(); return changed(); }
    const body = { ...user_part(), filter, k: 1, explain: true };
    if (shown.model.tasks.length) body.candidates = 1;
    // In a list of requests, an invalid filter is part of the answer rather than a failed call.
    const answer = await ask(`${base()}:retrieve`, { method: "POST", body: { requests: [body] } });
    if (mine !== turn) return;
    if (!answer.ok) return said.replaceChildren(problem(answer));
    const [result] = answer.content.results;
    if (result.problem) return said.replaceChildren(problem({ status: result.problem.status, content: result.problem }, filter));
    const share = result.explain.pass_rate;
    said.textContent = `about ${whole(Math.round(share * shown.model.items))} of ${whole(shown.model.items)} items pass (${percent(share)}): ${result.explain.filter}`;
    changed();
  });
  input.addEventListener("input", check);
  return { element: make("div", {}, box, said), value: () => input.value };
}

function example_filter() {
  const column = shown.model.columns.find(c => c.filter && c.kind === "texts");
  const number = shown.model.columns.find(c => c.filter && c.kind !== "texts");
  return [column && `${column.name}:value`, number && `${number.name} > 1`].filter(Boolean).join(" AND ") || "id IN [1, 2]";
}
