// Goes on from look.js: clicks, hovers, types and saves, and returns what came of it.
const accuracy = of("-accuracy");
const press = (label) => [...accuracy.querySelectorAll("button")].find((b) => b.textContent === label).click();
seen.before = lines(accuracy);
accuracy.querySelector(".legend button").click();
seen.hidden = lines(accuracy);
seen.pressed = accuracy.querySelector(".legend button").getAttribute("aria-pressed");
seen.focusKept = document.activeElement === accuracy.querySelector(".legend button");
accuracy.querySelector(".legend button").click();
seen.back = lines(accuracy);

const svg = accuracy.drawn.svg, box = svg.getBoundingClientRect();
svg.dispatchEvent(new PointerEvent("pointermove", { clientX: box.left + box.width * 0.99, clientY: box.top + 80 }));
seen.tip = accuracy.querySelector(".tip").textContent;
seen.tipTop = box.bottom - accuracy.querySelector(".tip").getBoundingClientRect().top;
svg.dispatchEvent(new PointerEvent("pointerleave"));
seen.tipGone = accuracy.querySelector(".tip") === null;
svg.focus();
seen.focused = document.activeElement === svg;
svg.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight", bubbles: true }));
seen.spoken = accuracy.querySelector("[aria-live]").textContent;

seen.tables = {};
for (const figure of figures) {
  const button = [...figure.querySelectorAll("button")].find((b) => b.textContent === "Table");
  button.click();
  seen.tables[figure.dataset.plot] = [...figure.querySelectorAll("tbody tr")].map((row) => [...row.cells].map((cell) => cell.textContent));
  button.click();
}
const pick = accuracy.querySelector("select");
pick.value = 2; pick.dispatchEvent(new Event("change"));
seen.label = accuracy.querySelector(".plot > svg .axis").textContent;
press("Table");
seen.shown = [...accuracy.querySelectorAll("tr")].slice(0, 2).map((row) => [...row.cells].map((cell) => cell.textContent));
press("Table");
const reachable = "a[href], button, select, summary, svg[tabindex], .scroll";
seen.unreachable = [...document.querySelectorAll(reachable)].filter((node) => node.tabIndex < 0).length;

const saved = [];
HTMLAnchorElement.prototype.click = function () { saved.push(this.download); };
const blobs = [], make0 = URL.createObjectURL;
URL.createObjectURL = (blob) => { blobs.push(blob); return make0.call(URL, blob); };
press("CSV"); press("PNG");
for (let i = 0; i < 60 && blobs.length < 2; i++) await new Promise((done) => setTimeout(done, 50));
seen.saved = saved;
seen.csv = await blobs[0].text();
seen.png = [...new Uint8Array(await blobs[1].slice(1, 4).arrayBuffer())].map((c) => String.fromCharCode(c)).join("");
seen.pngSize = blobs[1].size;
return seen;
