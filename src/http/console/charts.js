// Pictures: lines over time, bars, the waterfall of steps.
const WIDE = 420, HIGH = 150, LEFT = 46, LOW = 22;

function legend(names) {
  return make("div", { class: "legend" }, names.map((name, n) => make("span", {}, make("i", { style: `background:${color(n)}` }), name)));
}

// `series`: [{name, points: [[x, y], ...]}], y from 0 up.
function lines(title, series, { x_text = short, y_text = short, log_x = false } = {}) {
  const points = series.flatMap(one => one.points).filter(([, y]) => Number.isFinite(y));
  const panel = make("figure", { class: "panel" }, make("h3", {}, title));
  if (!series.some(one => one.points.length > 1)) return put(panel, {}, [make("p", { class: "muted" }, "nothing yet")]);
  const place = x => log_x ? Math.log10(Math.max(x, 1e-9)) : x;
  const xs = points.map(([x]) => place(x)), least = Math.min(...xs), most = Math.max(...xs), top = Math.max(...points.map(([, y]) => y)) || 1;
  const left = x => LEFT + (WIDE - LEFT - 8) * (most > least ? (place(x) - least) / (most - least) : .5);
  const down = y => HIGH - LOW - (HIGH - LOW - 10) * y / top;
  const picture = draw("svg", { viewBox: `0 0 ${WIDE} ${HIGH}`, role: "img", "aria-label": `${title}: ${series.map(one => `${one.name} ${y_text(one.points.at(-1)?.[1] ?? 0)}`).join(", ")}` });
  for (const part of [0, .5, 1]) {
    const y = down(top * part);
    picture.append(draw("line", { class: "grid-line", x1: LEFT, x2: WIDE - 8, y1: y, y2: y }), draw("text", { x: LEFT - 4, y: y + 4, "text-anchor": "end" }, y_text(top * part)));
  }
  const ends = points.map(([x]) => x);
  picture.append(draw("text", { x: LEFT, y: HIGH - 6 }, x_text(Math.min(...ends))), draw("text", { x: WIDE - 8, y: HIGH - 6, "text-anchor": "end" }, x_text(Math.max(...ends))));
  series.forEach(({ points }, n) => {
    const path = points.filter(([, y]) => Number.isFinite(y)).map(([x, y], at) => `${at ? "L" : "M"}${left(x).toFixed(1)} ${down(y).toFixed(1)}`).join("");
    picture.append(draw("path", { d: path, fill: "none", stroke: color(n), "stroke-width": 2 }));
  });
  return put(panel, {}, [picture, series.length > 1 ? legend(series.map(one => one.name)) : null]);
}

// `rows`: [[name, amount, text]].
function bars(title, rows) {
  const most = Math.max(...rows.map(([, amount]) => amount), 1e-12);
  const made = rows.map(([name, amount, text], n) => [name, make("span", { class: "bar", style: `width:${(100 * amount / most).toFixed(1)}%;background:${color(0)}`, "aria-hidden": "true" }), make("span", { class: "moved" }, text)]);
  return make("figure", { class: "panel bars" }, make("h3", {}, title), table(null, made, title));
}

// An area for each of `parts`, [{name, size, kind, text}], as wide as its share of the sizes, in the colour of its kind.
function areas(title, parts) {
  const all = parts.reduce((sum, part) => sum + part.size, 0) || 1, kinds = [...new Set(parts.map(part => part.kind))];
  const picture = draw("svg", { viewBox: "0 0 1000 120", role: "img", "aria-label": `${title}: ${parts.map(part => `${part.name} ${part.text}`).join(", ")}` });
  let left = 0;
  for (const { name, size, kind, text } of parts) {
    const wide = 1000 * size / all;
    picture.append(draw("rect", { x: left, y: 10, width: Math.max(wide - 2, 1), height: 80, fill: color(kinds.indexOf(kind)), opacity: .85 }, draw("title", {}, `${name}: ${text}, ${kind}`)));
    if (wide > 60) picture.append(draw("text", { x: left + 4, y: 108 }, name));
    left += wide;
  }
  return make("div", { class: "panel" }, picture, legend(kinds));
}

// The steps of an answer, one after another in time.
function waterfall(steps) {
  const total = steps.reduce((sum, step) => sum + step.micros, 0) || 1;
  let begun = 0;
  const rows = steps.map(step => {
    const bar = make("span", { class: "bar", style: `margin-left:${(100 * begun / total).toFixed(2)}%;width:${(100 * step.micros / total).toFixed(2)}%`, "aria-hidden": "true" });
    begun += step.micros;
    return [step.name, step.micros, bar, step.items, step.bytes];
  });
  const made = table(["step", "µs", `of ${micros(total)}`, "items", "bytes"], rows, "Steps");
  made.querySelectorAll("tr > :nth-child(3)").forEach(part => part.style.width = "50%");
  return made;
}

function funnel(explain, items) {
  const eligible = explain.pass_rate === undefined ? null : Math.round(explain.pass_rate * items);
  const stages = [["items", items], ["eligible", eligible], ["scanned", explain.scanned], ["survivors", explain.survivors], ["candidates", explain.candidates], ["returned", explain.returned]];
  return bars("Funnel", stages.filter(([, count]) => Number.isFinite(count)).map(([name, count]) => [name, Math.log1p(count), whole(count)]));
}
