// Inputs for the model's schema: features, columns, constants. Each returns its value.

// Text field with suggestions. `find(text)` returns [{text, note, value}]; `take(option)` receives the selected one.
function combo(label, find, take, input = make("input", { type: "text", spellcheck: "false" })) {
  const list_id = `list-${Math.random().toString(36).slice(2)}`;
  const list = make("ul", { role: "listbox", id: list_id, hidden: true, "aria-label": label });
  let options = [], chosen = -1, turn = 0;
  put(input, { role: "combobox", "aria-label": label, "aria-autocomplete": "list", "aria-expanded": "false", "aria-controls": list_id }, []);
  const close = () => { list.hidden = true; chosen = -1; input.setAttribute("aria-expanded", "false"); input.removeAttribute("aria-activedescendant"); };
  const mark = () => [...list.children].forEach((option, n) => {
    option.setAttribute("aria-selected", n === chosen);
    if (n === chosen) { input.setAttribute("aria-activedescendant", option.id); option.scrollIntoView({ block: "nearest" }); }
  });
  const choose = option => { close(); take(option, input); };
  const show = async () => {
    const mine = ++turn, found = await find(input.value, input);
    if (mine !== turn || document.activeElement !== input) return;
    options = found;
    chosen = -1;
    list.replaceChildren(...options.map((option, n) => make("li", { role: "option", id: `${list_id}-${n}`, "aria-selected": "false", onmousedown: event => { event.preventDefault(); choose(option); } },
      make("span", {}, option.text), make("span", { class: "muted" }, option.note ?? ""))));
    list.hidden = !options.length;
    input.setAttribute("aria-expanded", String(options.length > 0));
  };
  put(input, {
    oninput: after(120, show), onfocus: show, onblur: close,
    onkeydown: event => {
      if (event.key === "Escape") return close();
      if (event.key === "ArrowDown" && list.hidden) { event.preventDefault(); return show(); }
      if (list.hidden) return;
      if (event.key === "ArrowDown" || event.key === "ArrowUp") {
        event.preventDefault();
        chosen = (chosen + (event.key === "ArrowDown" ? 1 : -1) + options.length) % options.length;
        mark();
      } else if ((event.key === "Enter" || event.key === "Tab") && chosen >= 0) { event.preventDefault(); choose(options[chosen]); }
    },
  }, []);
  return make("div", { class: "combo" }, input, list);
}

const name_column = () => shown.model.columns.find(column => column.kind === "texts")?.name;

async function items_like(text, limit = 12) {
  const column = name_column();
  if (!column) return [];
  const answer = await ask(`${base()}/items?${new URLSearchParams({ column, contains: text, limit })}`);
  return answer.ok ? answer.content.items.map(item => ({ text: cell(item.attributes[column]), note: `#${item.id}`, value: item.id, item })) : [];
}

async function values_like(column, text, limit = 12) {
  const answer = await ask(`${base()}/columns/${encodeURIComponent(column)}?${new URLSearchParams({ contains: text, limit })}`);
  return answer.ok ? answer.content.values.map(({ value, items }) => ({ text: String(value), note: items === undefined ? "" : whole(items), value })) : [];
}

// A list of values as chips, added through a combo box or by Enter.
function chips(name, find, read) {
  const kept = [], list = make("ul", { class: "chips", "aria-label": name });
  const render = () => list.replaceChildren(...kept.map(({ value, text }, n) => make("li", {}, text === String(value) ? text : `${text} #${value}`,
    make("button", { type: "button", "aria-label": `remove ${text}`, onclick: () => { kept.splice(n, 1); render(); changed(); } }, "×"))));
  const add = (value, text) => { if (!kept.some(one => one.value === value)) kept.push({ value, text }); render(); changed(); };
  const box = combo(name, find, (option, input) => { add(option.value, option.text); input.value = ""; });
  const input = box.querySelector("input");
  input.addEventListener("keydown", event => {
    if (event.key !== "Enter" || event.defaultPrevented) return;
    event.preventDefault();
    const value = read(input.value.trim());
    if (value !== null) { add(value, String(value)); input.value = ""; }
  });
  return { element: make("div", {}, list, box), value: () => kept.map(one => one.value), set: all => { kept.splice(0, kept.length, ...all); render(); } };
}

function numbers(name, width) {
  const input = make("textarea", { rows: 2, "aria-label": name, spellcheck: "false", oninput: after(300, () => changed()) });
  const fill = read => input.value = JSON.stringify(Array.from({ length: width }, read));
  fill(() => 0);
  const random = make("button", { type: "button", onclick: () => { fill(() => +(Math.random() * 2 - 1).toFixed(3)); changed(); } }, "random");
  return { element: make("div", {}, input, random), value: () => parsed(input.value) };
}

function passage(name) {
  const input = make("textarea", { rows: 2, "aria-label": name, oninput: after(300, () => changed()) });
  return { element: make("div", {}, input), value: () => input.value };
}

function feature_field({ name, kind, width }) {
  const has_column = shown.model.columns.some(column => column.name === name && column.kind !== "floats");
  const field = kind === "dense" ? numbers(name, width)
    : kind === "text" ? passage(name)
    : kind === "ids" ? chips(name, text => items_like(text), text => is_whole(text) ? integer(text) : null)
    : chips(name, has_column ? text => values_like(name, text) : () => [], text => text || null);
  const hint = kind === "ids" ? "ids, found by an item's name" : kind === "dense" ? `${width} numbers` : kind === "text" ? "a text" : "values";
  return { name, kind, ...field, element: make("div", { class: "field" }, make("span", {}, make("strong", {}, name), " ", make("span", { class: "muted" }, hint)), field.element) };
}

function slider(name, value, { least = 0, most = Math.max(1, Math.abs(value) * 2), step = (most - least) / 200, tell = () => {}, help } = {}) {
  const range = make("input", { type: "range", min: least, max: most, step, value, "aria-label": name });
  const number = make("input", { type: "number", step: "any", value, "aria-label": `${name}, exactly` });
  range.addEventListener("input", () => { number.value = range.value; tell(); });
  number.addEventListener("input", () => { range.value = number.value; tell(); });
  return { element: make("span", { class: "inline", title: help }, name, range, number), value: () => number.value === "" ? undefined : Number(number.value) };
}
