// The page: every figure gets its choices, legend, plot, table and downloads.
const PAGE = JSON.parse(document.getElementById("data").textContent);

function viewOf(plot, state) {
  return state.picked.reduce((views, index) => (views ? views[index] : null), plot.views);
}

// --- the same numbers as a table: a head and rows of raw values, with the unit of each column
function tableOf(plot, view) {
  if (!view) return { head: [], units: [], rows: [] };
  if (plot.kind === "bars") {
    const head = [plot.label, ...view.series.map((one) => one.name)];
    const rows = plot.names.map((name, i) => [name, ...view.series.map((one) => one.values[i])]);
    return { head, units: ["", ...view.series.map(() => view.y.unit)], rows };
  }
  if (plot.kind === "lines") {
    const rows = view.series.flatMap((one) => one.points.map((p) => [one.name, ...p]));
    const unit = view.y.unit;
    return { head: ["method", "keep", view.y.label + ", mean", "least", "largest", plot.of + "s"], units: ["", "share", unit, unit, unit, "count"], rows };
  }
  return { head: ["statement", "what", "value"], units: ["", "", ""], rows: view.flatMap((card) => [[card.title, "in words", card.text], ...card.rows.map((row) => [card.title, ...row])]) };
}

// One unit for a column, said in its head: the table rounds its numbers, the CSV gives all digits of the same ones.
const UNITS = { share: [" (%)", 100], points: [" (points)", 100], seconds: [" (s)", 1] };
const headed = (table) => table.head.map((name, i) => name + (UNITS[table.units[i]]?.[0] || ""));
const inUnit = (value, unit) => Number((value * (UNITS[unit]?.[1] || 1)).toPrecision(10));

function drawTable(table) {
  const cell = (value, unit) => (typeof value === "number" ? worded(value, unit, true).replace(/ (%|points|s)$/, "") : value === null ? "none" : value);
  const head = make("tr", {}, ...headed(table).map((name) => make("th", { scope: "col" }, name)));
  const rows = table.rows.map((row) => make("tr", {}, ...row.map((value, i) => make("td", {}, String(cell(value, table.units[i]))))));
  return make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Table of values" },
    make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows)));
}

const tied = (words) => words.replace(/(\d) %/g, "$1\u00a0%"); // no line begins with the sign

function drawCards(view) {
  const cards = view.map((card) => {
    const rows = card.rows.map(([name, value]) => make("tr", {}, make("th", { scope: "row" }, name), make("td", {}, value)));
    const inside = [make("p", {}, tied(card.text)), make("table", {}, make("tbody", {}, ...rows))];
    if (card.folded) return make("details", {}, make("summary", {}, `${card.title}: ${card.folded}`), ...inside);
    return make("div", card.useless ? { class: "worthless" } : {}, make("strong", {}, card.title), ...inside);
  });
  return make("div", { class: "cards" }, ...cards);
}

// --- downloads
function save(name, blob) {
  const url = URL.createObjectURL(blob), anchor = make("a", { href: url, download: name });
  document.body.append(anchor);
  anchor.click();
  anchor.remove();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}
function csvOf(table) {
  // A leading = + - @ in a name would be a formula to a spreadsheet.
  const field = (value, unit) => (typeof value === "number" ? String(inUnit(value, unit)) : value === null ? "" : `"${String(value).replace(/^[=+\-@\t\r]/, "'$&").replaceAll('"', '""')}"`);
  const rows = table.rows.map((row) => row.map((value, i) => field(value, table.units[i])));
  return [headed(table).map((name) => field(name)), ...rows].map((row) => row.join(",")).join("\r\n") + "\r\n";
}
const COPIED = ["fill", "fill-opacity", "stroke", "stroke-width", "stroke-opacity", "stroke-dasharray", "stroke-linejoin", "font-family", "font-size", "font-weight"];
function copied(svg, place) { // with its computed colours written out
  const copy = svg.cloneNode(true), all = copy.querySelectorAll("*");
  for (const [node, twin] of [[svg, copy], ...[...svg.querySelectorAll("*")].map((node, i) => [node, all[i]])]) {
    const computed = getComputedStyle(node);
    for (const key of COPIED) twin.style.setProperty(key, computed.getPropertyValue(key));
  }
  for (const [key, value] of Object.entries(place)) copy.setAttribute(key, value);
  return copy;
}
function picture(svg, legend, title) {
  // A stand-alone SVG with background, title and legend, which live outside of the plot.
  const width = svg.viewBox.baseVal.width, inner = svg.viewBox.baseVal.height;
  let at = 12, row = 0;
  const places = legend.map(([name]) => {
    const wide = 52 + 7.4 * name.length;
    if (at > 12 && at + wide > width) [at, row] = [12, row + 1];
    at += wide;
    return [at - wide, 33 + 22 * row];
  });
  const head = 30 + (legend.length ? 24 + 22 * row : 0);
  const style = getComputedStyle(document.body);
  const whole = make("svg:svg", { xmlns: SVG, viewBox: `0 0 ${width} ${inner + head}`, width: 2 * width, height: 2 * (inner + head) });
  const font = { "font-family": style.fontFamily, "font-size": "13px" };
  whole.append(make("svg:rect", { width: "100%", height: "100%", fill: getComputedStyle(document.querySelector("section")).backgroundColor }));
  whole.append(make("svg:text", { x: 12, y: 20, fill: style.color, "font-weight": "600", ...font }, title));
  legend.forEach(([name, look], i) => {
    const [x, y] = places[i];
    whole.append(copied(look, { x, y, width: 30, height: 14 }), make("svg:text", { x: x + 36, y: y + 11, fill: style.color, ...font }, name));
  });
  whole.append(copied(svg, { y: head, height: inner }));
  return new XMLSerializer().serializeToString(whole);
}
function savePicture(name, source) {
  const image = new Image();
  return new Promise((done, failed) => {
    image.onload = () => {
      const canvas = make("canvas", { width: image.width, height: image.height });
      canvas.getContext("2d").drawImage(image, 0, 0);
      canvas.toBlob((blob) => { save(name, blob); done(blob.size); }, "image/png");
    };
    image.onerror = () => failed(new Error("the picture could not be drawn"));
    image.src = "data:image/svg+xml;charset=utf-8," + encodeURIComponent(source);
  });
}

// --- hovering, and the same by arrow keys
function follow(holder, drawn) {
  const { svg, stops, by, box } = drawn;
  const spoken = make("div", { class: "hidden-text", "aria-live": "polite" });
  holder.append(spoken);
  let tip = null, marks = null, current = -1;
  const hide = () => { tip?.remove(); marks?.remove(); tip = marks = null; current = -1; };
  const show = (index, aloud) => {
    if (index === current || !stops[index]) return;
    hide();
    current = index;
    const stop = stops[index];
    const rows = stop.rows.map(([cls, name, value]) => make("tr", {}, make("td", { class: cls }, make("span", { class: "dot" }), make("span", { class: "name" }, name)), make("td", {}, value)));
    tip = make("div", { class: "tip" }, make("strong", {}, stop.title), make("table", {}, make("tbody", {}, ...rows)));
    holder.append(tip);
    marks = make("svg:g");
    if (by === "x") marks.append(line(stop.x, box.top, stop.x, box.bottom, "cross"));
    if (by === "y") marks.append(make("svg:rect", { x: 0, width: svg.viewBox.baseVal.width, y: stop.y - stop.high / 2, height: stop.high, class: "pointed" }));
    for (const [x, y] of stop.rings) marks.append(make("svg:circle", { cx: x, cy: y, r: 7, class: "cross" }));
    svg.append(marks);
    const scale = svg.clientWidth / svg.viewBox.baseVal.width || 1, room = holder.clientWidth - tip.offsetWidth;
    const left = stop.x * scale + 16 <= room ? stop.x * scale + 16 : stop.x * scale - tip.offsetWidth - 16;
    tip.style.left = Math.max(0, Math.min(room, left)) + "px";
    const above = svg.getBoundingClientRect().top - holder.getBoundingClientRect().top;
    const narrow = holder.clientWidth < 520; // there it would hide the plot, so it goes below
    tip.style.top = above + (narrow ? svg.clientHeight : by === "x" ? 18 : stop.y * scale + 14) + "px";
    if (aloud) spoken.textContent = stop.title + ": " + stop.rows.map(([, name, value]) => `${name} ${value}`).join("; ");
  };
  svg.addEventListener("pointermove", (event) => {
    const bounds = svg.getBoundingClientRect(), scale = svg.viewBox.baseVal.width / bounds.width;
    const at = [(event.clientX - bounds.left) * scale, (event.clientY - bounds.top) * scale];
    const far = (stop) => Math.abs(by === "x" ? stop.x - at[0] : stop.y - at[1]);
    let best = -1;
    stops.forEach((stop, i) => { if (best < 0 || far(stop) < far(stops[best])) best = i; });
    show(best, false);
  });
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("blur", hide);
  svg.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (event.key === "Escape") hide();
    if (!step || !stops.length) return;
    event.preventDefault();
    show(current < 0 ? (step > 0 ? 0 : stops.length - 1) : Math.max(0, Math.min(stops.length - 1, current + step)), true);
  });
}

// --- one figure
function spreadOf(plot, pick) {
  const values = [plot.views].flat(9).flatMap((view) => (view?.series || []).flatMap((one) => (one.points || []).map(pick)));
  const sizes = values.map(Math.abs).filter((v) => v > 0);
  return sizes.length ? [Math.min(...sizes), Math.max(...sizes)] : [1, 1];
}
function legendOf(drawn, state, redraw) {
  const buttons = drawn.legend.map((name) => {
    const button = make("button", { type: "button", "aria-pressed": String(!state.hidden.has(name)), title: lookOf(name).about || name }, sample(lookOf(name)), name);
    button.addEventListener("click", () => { state.hidden.has(name) ? state.hidden.delete(name) : state.hidden.add(name); redraw(name); });
    return button;
  });
  return make("div", { class: "legend", role: "group", "aria-label": "Series shown" }, ...buttons);
}
function select(label, options, start, changed) {
  const node = make("select", {}, ...options.map((name, i) => make("option", { value: i }, name)));
  node.value = start;
  node.addEventListener("change", () => changed(Number(node.value)));
  return make("label", {}, label, node);
}

function fileName(figure, plot, state, kind) { // of which run, which plot, and what was chosen in it
  const title = document.getElementById(figure.closest("article").getAttribute("aria-labelledby")).textContent;
  const chosen = plot.choices.map((choice, i) => (choice.options.length > 1 ? choice.options[state.picked[i]] : ""));
  const slug = (words, n) => words.toLowerCase().replace(/[^a-z0-9.]+/g, "-").slice(0, n).replace(/^[-.]+|[-.]+$/g, "");
  return [slug(title, 60), slug([plot.title, ...chosen].join(" "), 90)].join("-") + "." + kind;
}

const figuresIn = (node) => (node.matches("figure") ? [node] : [...node.querySelectorAll("figure")]);
function setUp(figure) {
  const plot = PAGE.plots[figure.dataset.plot];
  const beside = figure.closest(".pair") || figure;
  beside.hiddenSeries ||= new Set(); // plots side by side show the same series
  const state = { picked: plot.choices.map((choice) => choice.start || 0), hidden: beside.hiddenSeries, table: false, xlog: false, ylog: false };
  const bar = make("div", { class: "bar" }), holder = make("div", { class: "plot" });
  const toggle = make("button", { type: "button", "aria-pressed": "false" }, "Table");
  const chosen = make("span", { class: "chosen" }); // what is picked, where the choices themselves do not show: in print
  let change = null; // the choice that only changes of accuracy have
  const draw = (focused) => {
    const view = viewOf(plot, state), table = tableOf(plot, view);
    holder.replaceChildren();
    figure.drawn = null;
    chosen.textContent = plot.choices.map((choice, i) => ": " + choice.options[state.picked[i]]).join("");
    if (change) change.hidden = view?.y?.unit !== "points";
    if (state.table) return holder.append(drawTable(table));
    if (plot.kind === "cards") return holder.append(drawCards(view));
    if (!view) return holder.append(make("p", { class: "detail" }, "This network is not finished, or did not record this."));
    const drawn = DRAW[plot.kind](plot, view, { ...state, ylog: state.ylog && view.y?.unit === "points" }, Math.max(280, figure.clientWidth || 640));
    if (drawn.legend.length) holder.append(legendOf(drawn, state, (name) => figuresIn(beside).forEach((one) => one.redraw(one === figure ? name : null))));
    holder.append(drawn.svg);
    if (drawn.note) holder.append(make("p", { class: "caption" }, tied(drawn.note)));
    follow(holder, drawn);
    figure.drawn = drawn;
    if (focused) [...holder.querySelectorAll(".legend button")][drawn.legend.indexOf(focused)]?.focus();
  };
  plot.choices.forEach((choice, i) => {
    if (choice.options.length > 1) bar.append(select(choice.label, choice.options, state.picked[i], (to) => { state.picked[i] = to; draw(); }));
  });
  if (plot.kind === "lines") {
    const [least, most] = spreadOf(plot, (p) => p[0]);
    state.xlog = most / least > 8;
    bar.append(select("Keep axis", ["linear", "log"], Number(state.xlog), (to) => { state.xlog = to === 1; draw(); }));
    const changes = [plot.views].flat(9).filter((view) => view.y?.unit === "points");
    if (changes.length) {
      state.ylog = spreadOf({ views: changes }, (p) => p[1])[1] > 0.1;
      change = select("Change axis", ["linear", "log near zero"], Number(state.ylog), (to) => { state.ylog = to === 1; draw(); });
      bar.append(change);
    }
  }
  toggle.addEventListener("click", () => { state.table = !state.table; toggle.setAttribute("aria-pressed", String(state.table)); draw(); });
  const csv = make("button", { type: "button", "aria-label": "Save as CSV" }, "CSV"), png = make("button", { type: "button", "aria-label": "Save as PNG" }, "PNG");
  csv.addEventListener("click", () => save(fileName(figure, plot, state, "csv"), new Blob(["\ufeff" + csvOf(tableOf(plot, viewOf(plot, state)))], { type: "text/csv" })));
  figure.picture = () => {
    if (!figure.drawn) { state.table = false; toggle.setAttribute("aria-pressed", "false"); draw(); }
    const looks = [...holder.querySelectorAll(".legend svg")];
    const shown = figure.drawn.legend.map((name, i) => [name, looks[i]]).filter(([name]) => !state.hidden.has(name));
    return picture(figure.drawn.svg, shown, plot.title + chosen.textContent);
  };
  png.addEventListener("click", () => savePicture(fileName(figure, plot, state, "png"), figure.picture()));
  bar.append(make("div", { class: "tools" }, toggle, csv, ...(plot.kind === "cards" ? [] : [png])));
  // The heading of a section is enough for its only plot; print and screen readers still have the plot's own words.
  const all = figure.closest("section").querySelectorAll("figure"), alone = all.length === 1 || (plot.kind === "cards" && all[0] === figure);
  figure.append(make("figcaption", alone ? { class: "alone" } : {}, plot.title, chosen), bar, holder);
  figure.redraw = draw;
  draw();
}

document.querySelectorAll("details").forEach((one) => one.addEventListener("toggle", () => {
  one.querySelectorAll("figure[data-plot]").forEach((figure) => figure.redraw());
}));
document.querySelectorAll("h1, h2, h3, p, li, dd").forEach((one) => one.childNodes.forEach((node) => { if (node.nodeType === 3) node.data = tied(node.data); }));
const FIGURES = [...document.querySelectorAll("figure[data-plot]")];
FIGURES.forEach(setUp);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => FIGURES.forEach((figure) => figure.redraw()));
let width = document.documentElement.clientWidth;
window.addEventListener("resize", () => {
  if (document.documentElement.clientWidth === width) return;
  width = document.documentElement.clientWidth;
  FIGURES.forEach((figure) => figure.redraw());
});
