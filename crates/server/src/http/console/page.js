// Shared by all pages: creates elements, formats numbers, sends requests, and holds the current selection.
const at = id => document.getElementById(id);

function put(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter(child => child !== null && child !== undefined));
  return element;
}
const make = (tag, attributes, ...children) => put(document.createElement(tag), attributes, children);
const draw = (tag, attributes, ...children) => put(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

// Parses JSON with integers beyond 2^53 as BigInt: as numbers, such ids would be rounded.
const is_whole = text => /^-?\d+$/.test(text);
const integer = text => Number.isSafeInteger(Number(text)) ? Number(text) : BigInt(text);
function parsed(text) {
  // Browsers whose JSON.parse gives no source text (before 2025) round such numbers: they are shown with a leading ≈.
  const exact = (_, value, { source } = {}) => typeof value !== "number" || Math.abs(value) <= Number.MAX_SAFE_INTEGER ? value
    : source === undefined ? `≈${value}` : is_whole(source) ? BigInt(source) : value;
  return JSON.parse(text, exact);
}
const written = (value, indent) => JSON.stringify(value, (_, value) => typeof value === "bigint" ? JSON.rawJSON(String(value)) : value, indent);

const is_number = value => typeof value === "number" || typeof value === "bigint";
const whole = number => (is_number(number) ? number : Number(number)).toLocaleString("en");
function short(number) {
  if (typeof number === "bigint" || Number.isInteger(number)) return whole(number);
  return Math.abs(number) < 1e-3 ? Number(number).toExponential(2) : Math.abs(number) >= 1000 ? whole(Math.round(number)) : String(+Number(number).toPrecision(3));
}
const percent = share => `${short(share * 100)} %`;
function bytes(count) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  for (; count >= 1000 && unit + 1 < units.length; unit++) count /= 1000;
  return `${unit ? count.toFixed(1) : count} ${units[unit]}`;
}
const micros = time => time < 1000 ? `${Math.round(time)} µs` : `${(time / 1000).toFixed(2)} ms`;
// Text that wraps after separators only, not within a word.
const breakable = name => name.split(/(?<=[/._-])/).flatMap((part, n) => n ? [make("wbr"), part] : [part]);
const cell = value => value === null || value === undefined ? "" : Array.isArray(value) ? value.join(", ") : String(value);
const after = (wait, work) => { let timer; return (...all) => { clearTimeout(timer); timer = setTimeout(() => work(...all), wait); }; };
const color = number => `var(--${["one", "two", "three", "four", "five"][number % 5]})`;

// Access key of the server, until this tab is closed.
const KEY = "sterling-key";

// Everything the server returns is data: it enters the page as text only.
async function ask(path, { method = "GET", body, signal } = {}) {
  const start = performance.now(), key = sessionStorage.getItem(KEY);
  try {
    const headers = { ...(body === undefined ? {} : { "Content-Type": "application/json" }), ...(key ? { Authorization: `Bearer ${key}` } : {}) };
    const reply = await fetch(path, { method, signal, headers, body: body === undefined ? undefined : written(body) });
    if (reply.status === 401) at("unlock").hidden = false;
    const text = await reply.text();
    const is_json = (reply.headers.get("content-type") ?? "").includes("json");
    const content = is_json ? parsed(text) : text;
    return { ok: reply.ok, status: reply.status, content, ms: performance.now() - start, bytes: text.length, id: reply.headers.get("x-request-id") };
  } catch (error) {
    if (error.name === "AbortError") return { ok: false, aborted: true };
    return { ok: false, status: 0, content: { title: "No answer", detail: `the server did not answer: ${error.message}` } };
  }
}

function problem(answer, text) {
  // Without an entered key, no error is shown: the page shows the field for the key.
  if (answer.status === 401 && !sessionStorage.getItem(KEY)) return make("p", {}, "This server needs a key.");
  const { title = "", detail = "", code = "", offset } = typeof answer.content === "object" ? answer.content : { detail: answer.content };
  const box = make("div", { class: "problem", role: "alert" }, make("strong", {}, `${answer.status || ""} ${title} `), make("code", {}, code), make("div", {}, detail));
  if (text !== undefined && offset !== undefined) {
    // The offset counts UTF-8 bytes.
    const before = new TextDecoder().decode(new TextEncoder().encode(text).slice(0, offset));
    const rest = text.slice(before.length);
    box.append(make("code", {}, before, make("mark", {}, rest.slice(0, 1) || "⏎"), rest.slice(1)));
  }
  if (answer.id) box.append(make("div", { class: "muted" }, `request ${answer.id}`));
  return box;
}

function table(head, rows, caption) {
  const are_numbers = (head ?? rows[0] ?? []).map((_, n) => rows.length > 0 && rows.every(row => is_number(row[n])));
  const top = make("tr", {}, (head ?? []).map((name, n) => make("th", { scope: "col", class: are_numbers[n] ? "number" : null }, name)));
  const line = row => make("tr", {}, row.map((value, n) =>
    value instanceof Node ? make("td", {}, value) : make("td", { class: are_numbers[n] ? "number" : null }, are_numbers[n] ? short(value) : cell(value))));
  return make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": caption },
    make("table", {}, make("caption", { hidden: true }, caption), head ? make("thead", {}, top) : null, make("tbody", {}, rows.map(line))));
}

const shown = { models: [], model: null, versions: [] };
const base = () => `/v1/models/${encodeURIComponent(shown.model.name)}`;
