"use strict";
// Drawing: a plot, one of its views and a state in; an SVG, the stops that a pointer or a key can rest on, and the
// series of the legend out. Colours are classes (m0.. for methods, p0.. for parts), so that light, dark and print differ.
const SVG = "http://www.w3.org/2000/svg";

function make(tag, attributes, ...children) {
  const node = tag.startsWith("svg:") ? document.createElementNS(SVG, tag.slice(4)) : document.createElement(tag);
  for (const [key, value] of Object.entries(attributes || {})) node.setAttribute(key, value);
  for (const child of children) node.append(child);
  return node;
}

// --- numbers in words; `exact` is for hovering and tables
function plain(value, digits) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size < 1e-3 || size >= 1e6) return value.toExponential(Math.max(0, digits - 2));
  return Number(value.toPrecision(digits)).toLocaleString("en", { maximumFractionDigits: 8 });
}
function rounded(percent, exact) { // 191, 6.4, 0.25; exact: 190.83, 6.42, 0.2514
  const size = Math.abs(percent);
  if (size === 0 || size >= 1) return Number(percent.toFixed(exact ? 2 : size < 100 ? 1 : 0)).toLocaleString("en");
  return plain(percent, exact ? 4 : 2);
}
function worded(value, unit, exact) {
  if (value === null || value === undefined) return "none";
  const digits = exact ? 4 : 3;
  if (unit === "share") return rounded(100 * value, exact) + " %";
  if (unit === "points") return (value > 0 ? "+" : "") + Number((100 * value).toFixed(2)) + (exact ? " points" : "");
  if (unit === "seconds") return plain(value, digits) + " s";
  return plain(value, digits);
}
function ticked(value, unit) {
  if (unit !== "number" && unit !== "count") return worded(value, unit);
  if (Math.abs(value) >= 1e4 && Math.abs(value) < 1e9) return new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 }).format(value);
  return plain(value, 3);
}
// --- scales: a function from value to position, with its ticks
function steps(low, high, count) {
  const raw = (high - low) / Math.max(1, count) || 1;
  const base = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * base).find((s) => s >= raw * 0.999);
  const ticks = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) ticks.push(Number((k * step).toPrecision(12)));
  return ticks;
}
function linear(low, high, from, to, count) {
  const span = high - low || 1;
  const scale = (v) => from + ((v - low) / span) * (to - from);
  return Object.assign(scale, { ticks: steps(low, high, count) });
}
function logarithmic(low, high, from, to, count, floor) {
  const a = Math.log10(low), span = Math.log10(high) - a || 1;
  const scale = (v) => (v > 0 ? from + (Math.max(0, Math.log10(v) - a) / span) * (to - from) : floor ?? from);
  let ticks = [];
  for (const marks of [[1, 1.5, 2, 3, 4, 5, 7], [1, 2, 5], [1, 3], [1]]) {
    ticks = [];
    for (let k = Math.floor(a); k <= Math.ceil(a + span); k++)
      for (const m of marks) if (m * 10 ** k >= low * 0.999 && m * 10 ** k <= high * 1.001) ticks.push(m * 10 ** k);
    if (ticks.length <= count + 2) break;
  }
  const every = Math.ceil(ticks.length / (count + 2));
  return Object.assign(scale, { ticks: ticks.filter((_, i) => i % every === 0) });
}
const STEEP = 12; // largest to least epsilon from which on its axis is logarithmic
const NEAR = 0.005; // half a percentage point: linear below, logarithmic above
function nearZero(low, high, from, to) {
  const squeeze = (v) => Math.sign(v) * Math.log1p(Math.abs(v) / NEAR);
  const a = squeeze(low), span = squeeze(high) - a || 1;
  const scale = (v) => from + ((squeeze(v) - a) / span) * (to - from);
  const marks = [0.5, 1, 0.2, 0.1, 0.05, 0.02, 0.01, 0.005].flatMap((v) => [v, -v]);
  const taken = [0];
  for (const v of marks) if (v >= low && v <= high && taken.every((t) => Math.abs(scale(t) - scale(v)) > 17)) taken.push(v);
  return Object.assign(scale, { ticks: taken.filter((v) => v >= low && v <= high) });
}

// --- the look of a series
function lookOf(name) {
  if (PAGE.parts[name] && !PAGE.styles[name]) return { cls: PAGE.parts[name], marker: "box", dash: [], hollow: name === "repaired" };
  return PAGE.styles[name] || { cls: "other", marker: "none", dash: [4, 3] };
}
function marker(look, x, y, size) {
  const cls = (look.hollow ? "hollow " : "mark ") + look.cls, r = size;
  const path = (d, c) => make("svg:path", { d, class: c || cls });
  switch (look.marker) {
    case "circle": return make("svg:circle", { cx: x, cy: y, r, class: cls });
    case "square": return make("svg:rect", { x: x - r * 0.9, y: y - r * 0.9, width: r * 1.8, height: r * 1.8, class: cls });
    case "diamond": return path(`M${x} ${y - r * 1.3}L${x + r * 1.3} ${y}L${x} ${y + r * 1.3}L${x - r * 1.3} ${y}Z`);
    case "up": return path(`M${x} ${y - r * 1.2}L${x + r * 1.15} ${y + r * 0.9}L${x - r * 1.15} ${y + r * 0.9}Z`);
    case "down": return path(`M${x} ${y + r * 1.2}L${x + r * 1.15} ${y - r * 0.9}L${x - r * 1.15} ${y - r * 0.9}Z`);
    case "plus": return stroked(path(`M${x - r} ${y}H${x + r}M${x} ${y - r}V${y + r}`, "stroked " + look.cls));
    case "cross": return stroked(path(`M${x - r} ${y - r}L${x + r} ${y + r}M${x - r} ${y + r}L${x + r} ${y - r}`, "stroked " + look.cls));
    default: return make("svg:g");
  }
  function stroked(lines) { // has no inside that could be left open: it gets a ring
    return look.hollow ? make("svg:g", {}, make("svg:circle", { cx: x, cy: y, r: r * 1.6, class: cls }), lines) : lines;
  }
}
function bar(svg, look, { x, y, width, height, rx }) { // a tint with an outline where markers are hollow
  svg.append(make("svg:rect", { x, y, width, height, rx: rx || 0, class: (look.hollow ? "tinted " : "box ") + look.cls }));
}
function sample(look) {
  const svg = make("svg:svg", { viewBox: "0 0 30 14", "aria-hidden": "true" });
  if (look.marker === "box") {
    bar(svg, look, { x: 10, y: 1, width: 19, height: 12, rx: look.hollow ? 0 : 3 });
    return svg;
  }
  svg.append(make("svg:path", { d: "M1 7H29", class: "line " + look.cls, "stroke-dasharray": look.dash.join(" ") }), marker(look, 15, 7, 4));
  return svg;
}

function frame(width, height, label) {
  return make("svg:svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", tabindex: "0", "aria-label": label });
}
function text(x, y, words, anchor, cls) {
  return make("svg:text", { x, y, "text-anchor": anchor, class: cls || "tick" }, words);
}
function line(x1, y1, x2, y2, cls) {
  return make("svg:path", { d: `M${x1} ${y1}L${x2} ${y2}`, class: cls });
}

// --- lines with bands, over keep
function valueScale(view, shown, box, near) {
  const values = shown.flatMap((one) => one.points.flatMap((p) => p.slice(1, 4))).filter((v) => v !== null && v !== undefined);
  if (view.reference) values.push(view.reference.value);
  let low = Math.min(...values), high = Math.max(...values);
  if (!values.length) [low, high] = [0, 1];
  const positive = values.filter((v) => v > 0), least = Math.min(...positive);
  if (view.y.log && positive.length && Math.max(...positive) / least > STEEP) {
    const hasZero = low <= 0;
    const y = logarithmic(least / 1.3, high * 1.25, box.bottom - (hasZero ? 18 : 0), box.top, 6, box.bottom);
    if (hasZero) y.ticks.unshift(0); // its own line below the logarithmic part
    return y;
  }
  if (near) return nearZero(low * 1.06, high + 0.003, box.bottom, box.top);
  if (view.y.log) low = Math.min(0, low);
  const pad = (high - low || Math.abs(high) || 1) * 0.06;
  const [first, second] = steps(low, high + pad, 6), step = second - first; // the topmost line lies above all points
  const top = step ? Math.ceil(high / step - 1e-9) * step : high + pad;
  return linear(low - (low === 0 ? 0 : pad), top, box.bottom, box.top, 6);
}
function keepAxis(svg, plot, view, box, height, isLog) {
  const keeps = view.series.flatMap((one) => one.points.map((p) => p[0])), width = box.right - box.left;
  const least = Math.min(...keeps), most = Math.max(...keeps);
  const x = isLog ? logarithmic(least, Math.max(most, least * 1.01), box.right - 12, box.left + 12, width / 70)
    : linear(Math.min(0, least), most, box.right - 12, box.left + 12, width / 80);
  for (const tick of x.ticks) {
    svg.append(line(x(tick), box.top, x(tick), box.bottom, "grid"));
    svg.append(text(x(tick), box.bottom + 18, worded(tick, plot.x.unit), "middle"));
  }
  const words = plot.x.label + ", sparser to the right";
  svg.append(text((box.left + box.right) / 2, height - 8, words.length * 7 < width ? words : "keep, sparser to the right", "middle", "axis"));
  return x;
}
function addStop(stops, plot, view, name, p, at) {
  const key = Math.round(at[0] / 3), known = [key, key - 1, key + 1].find((k) => stops.has(k)) ?? key;
  const of = (v) => worded(v, view.y.unit, true), unitless = (v) => of(v).replace(/ (points|%)$/, "");
  const title = `keep ${worded(p[0], "share", true)}, ${p[4]} ${plot.of}${p[4] > 1 ? "s" : ""}`;
  if (!stops.has(known)) stops.set(known, { x: at[0], title, rows: [], rings: [] });
  const band = p[4] > 1 ? ` (${unitless(p[2])} to ${unitless(p[3])})` : "";
  stops.get(known).rows.push([lookOf(name).cls, name, of(p[1]) + band]);
  stops.get(known).rings.push(at);
}
function drawLines(plot, view, state, width) {
  const shown = view.series.filter((one) => !state.hidden.has(one.name));
  const height = Math.round(Math.min(400, Math.max(width < 420 ? 230 : 270, width * 0.46)));
  const box = { left: 58, right: width - 16, top: 28, bottom: height - 50 };
  const svg = frame(width, height, `${plot.title}: ${view.y.label}. Left and right arrow keys read the values; the table shows them all.`);
  const y = valueScale(view, shown, box, state.ylog);
  const useless = view.useless && y(view.useless) > box.top && shown.some((one) => one.points.some((p) => p[1] >= view.useless));
  if (useless) {
    svg.append(make("svg:rect", { x: box.left, width: box.right - box.left, y: box.top, height: y(view.useless) - box.top, class: "useless" }));
  }
  for (const tick of y.ticks) {
    svg.append(line(box.left, y(tick), box.right, y(tick), tick === 0 ? "zero" : "grid"));
    svg.append(text(box.left - 8, y(tick) + 4, ticked(tick, view.y.unit), "end"));
  }
  svg.append(text(4, 12, view.y.label + (view.y.unit === "points" ? " (points)" : ""), "start", "axis"));
  const x = keepAxis(svg, plot, view, box, height, state.xlog);
  if (view.reference) {
    const at = y(view.reference.value);
    svg.append(line(box.left, at, box.right, at, "reference"), text(box.right - 4, at - 8, view.reference.label, "end"));
  }
  for (const { name, points } of shown) { // all bands lie below all lines
    if (!points.some((p) => p[3] > p[2])) continue;
    const upper = points.map((p) => `${x(p[0])} ${y(p[3])}`), lower = points.map((p) => `${x(p[0])} ${y(p[2])}`).reverse();
    svg.append(make("svg:path", { d: "M" + [...upper, ...lower].join("L") + "Z", class: "band " + lookOf(name).cls }));
  }
  const stops = new Map();
  for (const { name, points } of shown) {
    const look = lookOf(name), at = points.map((p) => [x(p[0]), y(p[1])]);
    svg.append(make("svg:path", { d: "M" + at.map((p) => p.join(" ")).join("L"), class: "line " + look.cls, "stroke-dasharray": look.dash.join(" ") }));
    at.forEach((place, i) => {
      svg.append(marker(look, ...place, 4));
      addStop(stops, plot, view, name, points[i], place);
    });
  }
  const ordered = [...stops.values()].sort((a, b) => a.x - b.x);
  const note = useless ? `Shaded: useless, since a network that always outputs 0 is off by 100 %.` : "";
  return { svg, stops: ordered, by: "x", box, legend: view.series.map((one) => one.name), note };
}

// --- bars over names: one column of bars for each series, the names beside them at every width
function barScale(view, shown, from, to) {
  const values = shown.flatMap((one) => one.values).filter((v) => v !== null), positive = values.filter((v) => v > 0);
  const high = Math.max(0, ...values) || 1, least = Math.min(...positive), count = Math.max(2, (to - from) / 70);
  if (view.y.log && positive.length && high / least > STEEP) return Object.assign(logarithmic(least / 1.3, high * 1.1, from, to, count), { isLog: true });
  return linear(0, high, from, to, count);
}
function drawColumn(svg, view, one, box, step) {
  const scale = barScale(view, box.all, box.left, box.right), look = lookOf(one.name), wide = box.right - box.left > 150;
  const last = scale.ticks.at(-1), ends = [last, scale(last) - scale(scale.ticks[0]) > 70 ? scale.ticks[0] : last];
  for (const tick of scale.ticks) {
    svg.append(line(scale(tick), box.top, scale(tick), box.bottom, tick === 0 ? "zero" : "grid"));
    if (!wide && !ends.includes(tick)) continue; // no room for more
    const anchor = scale(tick) < box.left + 12 ? "start" : scale(tick) > box.right - 24 ? "end" : "middle";
    svg.append(text(scale(tick), box.bottom + 14, ticked(tick, view.y.unit), anchor));
  }
  one.values.forEach((value, i) => {
    const middle = box.top + step * (i + 0.5);
    if (value === null) return;
    if (scale.isLog) svg.append(make("svg:circle", { cx: scale(value), cy: middle, r: 3.5, class: (look.hollow ? "hollow " : "mark ") + look.cls })); // a bar would start nowhere
    else bar(svg, look, { x: box.left, width: Math.max(value ? 0.7 : 0, scale(value) - box.left), y: middle - step * 0.34, height: step * 0.68 });
    if (box.hasValues) svg.append(text(scale(value) + 6, middle + 4, worded(value, view.y.unit), "start"));
  });
}
const VALUES_FROM = 96; // pixels of a column: with fewer there is no room for values beside the bars
const MOST_ROWS = 100; // of bars below one another: beyond, the first columns are enough at once
function drawBars(plot, view, state, width) {
  let shown = view.series.filter((one) => !state.hidden.has(one.name));
  const n = plot.names.length, asked = shown.length;
  const isPhone = width < 420, step = n > 30 ? 14 : isPhone ? 16 : 18;
  const longest = Math.max(...onAxis(plot.names, Infinity).map((name) => name.length));
  const left = Math.round(Math.min(7 * longest + 14, Math.max(230, width * 0.3), width * 0.38)), space = width - left - 6;
  const most = Math.max(1, Math.floor(space / (isPhone ? VALUES_FROM : 84)));
  shown = shown.slice(0, most * Math.max(1, Math.floor(MOST_ROWS / n)));
  const nBlocks = Math.max(1, Math.ceil(shown.length / most));
  const nColumns = Math.max(1, Math.ceil(shown.length / nBlocks)), gap = space / nColumns, high = 24 + step * n + 30;
  const height = nBlocks * high + 16, single = view.series.length === 1;
  const svg = frame(width, height, `${plot.title}: ${view.y.label}. Arrow keys read the bars; the table shows all values.`);
  const stops = [], names = onAxis(plot.names, Math.floor((left - 10) / 6.6));
  const heads = shortened(shown.map((one) => one.name), Math.floor((gap - 6) / 6.9));
  for (let block = 0; block < nBlocks; block++) {
    const top = block * high + 24, bottom = top + step * n;
    plot.names.forEach((name, i) => {
      const middle = top + step * (i + 0.5);
      if (i % 2 === 0) svg.append(make("svg:rect", { x: 0, width, y: top + step * i, height: step, class: "stripe" }));
      svg.append(text(left - 8, middle + 4, names[i], "end", "tick name"));
      const rows = shown.map((one) => [lookOf(one.name).cls, one.name, worded(one.values[i], view.y.unit, true)]);
      stops.push({ x: left, y: middle, high: step, title: name, rows, rings: [] });
    });
    shown.slice(block * nColumns, (block + 1) * nColumns).forEach((one, c) => {
      const hasValues = gap >= VALUES_FROM, from = left + gap * c, right = from + gap - (gap > 150 ? 60 : hasValues ? 52 : 12);
      if (!single) svg.append(text(from, top - 9, heads[block * nColumns + c], "start", "axis"));
      drawColumn(svg, view, one, { left: from, right, top, bottom, hasValues, all: shown }, step);
    });
  }
  const heading = shown.map((one) => one.name).join(", "); // the columns are headed by their names already
  if (single || view.y.label !== heading) svg.append(text(left, height - 4, view.y.label, "start", "axis"));
  const box = { left: 0, right: width, top: 0, bottom: height };
  const note = shown.length < asked ? `${shown.length} of ${asked} are drawn: hide some above or below to see the others.` : "";
  const isStyled = view.series.some((one) => PAGE.parts[one.name] || PAGE.styles[one.name]); // else all look alike
  return { svg, stops, by: "y", box, legend: single || !isStyled ? [] : view.series.map((one) => one.name), note };
}

const DRAW = { lines: drawLines, bars: drawBars };
