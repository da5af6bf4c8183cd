// Charts: lines over time, bars, and the waterfall of steps.
const WIDE = 420, HIGH = 150, LEFT = 46, LOW = 22;

// Legend: names with their colours, and values that `tell` updates.
function legend(names, values = []) {
  const texts = names.map((_, n) => make("b", {}, values[n] ?? ""));
  const element = make("div", { class: "legend" }, names.map((name, n) => make("span", {}, make("i", { style: `background:${color(n)}` }), `${name} `, texts[n])));
  return { element, tell: values => texts.forEach((value, n) => value.textContent = values[n]) };
}

// `series`: [{name, points: [[x, y], ...]}], with y at least 0.
function lines(title, all, { x_text = short, y_text = short, log_x = false } = {}) {
  // Without traffic, quantiles and rates are NaN.
  const series = all.map(({ name, points }) => ({ name, points: points.filter(([, y]) => Number.isFinite(y)) }));
  const points = series.flatMap(one => one.points);
  const panel = make("figure", { class: "panel" }, make("h3", {}, title));
  if (!series.some(one => one.points.length > 1)) return put(panel, {}, [make("p", { class: "muted" }, "nothing yet")]);
  const place = x => log_x ? Math.log10(Math.max(x, 1e-9)) : x;
  const xs = points.map(([x]) => place(x)), least = Math.min(...xs), most = Math.max(...xs), top = Math.max(...points.map(([, y]) => y)) || 1;
  const left = x => LEFT + (WIDE - LEFT - 8) * (most > least ? (place(x) - least) / (most - least) : .5);
  const down = y => HIGH - LOW - (HIGH - LOW - 10) * y / top;
  const said = point => point ? y_text(point[1]) : "none";
  const picture = draw("svg", { viewBox: `0 0 ${WIDE} ${HIGH}`, role: "img", "aria-label": `${title}: ${series.map(one => `${one.name} ${said(one.points.at(-1))}`).join(", ")}` });
  for (const part of [0, .5, 1]) {
    const y = down(top * part);
    picture.append(draw("line", { class: "grid-line", x1: LEFT, x2: WIDE - 8, y1: y, y2: y }), draw("text", { x: LEFT - 4, y: y + 4, "text-anchor": "end" }, y_text(top * part)));
  }
  const ends = points.map(([x]) => x);
  picture.append(draw("text", { x: LEFT, y: HIGH - 6 }, x_text(Math.min(...ends))), draw("text", { x: WIDE - 8, y: HIGH - 6, "text-anchor": "end" }, x_text(Math.max(...ends))));
  series.forEach(({ points }, n) => {
    const path = points.map(([x, y], at) => `${at ? "L" : "M"}${left(x).toFixed(1)} ${down(y).toFixed(1)}`).join("");
    picture.append(draw("path", { d: path, fill: "none", stroke: color(n), "stroke-width": 2 }));
  });
  // Values at the pointer; without a pointer the latest ones.
  const key = legend(series.map(one => one.name), series.map(one => said(one.points.at(-1))));
  const rule = draw("line", { class: "axis", y1: 10, y2: HIGH - LOW, visibility: "hidden" }), where = make("span", { class: "muted" });
  picture.append(rule);
  put(picture, {
    onpointermove: event => {
      const box = picture.getBoundingClientRect(), x = (event.clientX - box.left) * WIDE / box.width;
      const nearest = points => points.reduce((best, point) => !best || Math.abs(left(point[0]) - x) < Math.abs(left(best[0]) - x) ? point : best, undefined);
      const at_pointer = nearest(points);
      put(rule, { x1: left(at_pointer[0]), x2: left(at_pointer[0]), visibility: "visible" }, []);
      where.textContent = x_text(at_pointer[0]);
      key.tell(series.map(one => said(one.points.find(([x]) => x === at_pointer[0]) ?? nearest(one.points))));
    },
    onpointerleave: () => {
      put(rule, { visibility: "hidden" }, []);
      where.textContent = "";
      key.tell(series.map(one => said(one.points.at(-1))));
    },
  }, []);
  return put(panel, {}, [picture, put(key.element, {}, [where])]);
}

// `rows`: [[name, amount, text]].
function bars(title, rows) {
  const most = Math.max(...rows.map(([, amount]) => amount), 1e-12);
  const made = rows.map(([name, amount, text, help]) => [make("span", { title: help }, breakable(name)), make("span", { class: "bar", style: `width:${(100 * amount / most).toFixed(1)}%;background:${color(0)}`, "aria-hidden": "true" }), make("span", { class: "moved" }, text)]);
  return make("figure", { class: "panel bars" }, make("h3", {}, title), table(null, made, title));
}

// One area per entry of `parts`, [{name, size, kind, text}]: width by its share of the sizes, colour by kind.
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
  return make("div", { class: "panel" }, picture, legend(kinds).element);
}

// Waterfall of an answer's steps.
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
  const stages = [
    ["items", items, "Items of the catalogue."],
    ["eligible, about", eligible, "Items that pass the filter, as estimated from a sample."],
    ["scanned", explain.scanned, "Items of the probed lists whose scores were computed."],
    ["survivors", explain.survivors, "Items that pass the filter's bitmaps. A bitmap may pass items that the filter does not, so that this may exceed the eligible ones; each is checked exactly before it is returned."],
    ["candidates", explain.candidates, "The best by similarity, which the reranker scores."],
    ["returned", explain.returned, "Items of the answer."],
  ];
  return bars("Funnel (lengths are logarithmic)", stages.filter(([, count]) => Number.isFinite(count)).map(([name, count, help]) => [name, Math.log1p(count), whole(count), help]));
}
