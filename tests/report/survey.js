// Body of an async function: whether everything can be read, and stands where it should.
const texts = (svg) => [...svg.querySelectorAll("text")].map((node) => ({ words: node.textContent, box: node.getBoundingClientRect() }));
const shown = [...document.querySelectorAll("figure[data-plot]")].filter((figure) => figure.drawn && figure.offsetParent);
const found = { cut: [], overlapping: [], first: null, names: {}, series: {}, dashes: {}, hollow: {}, tinted: [], headings: [], captions: [], sections: [] };
for (const figure of shown) {
  const svg = figure.drawn.svg, frame = svg.getBoundingClientRect(), all = texts(svg), at = figure.dataset.plot;
  found.first ??= frame.bottom;
  found.names[at] = [...svg.querySelectorAll(".name")].map((node) => node.textContent);
  found.series[at] = [...svg.querySelectorAll(".line")].length;
  const lines = [...svg.querySelectorAll(".line")], hollow = [...svg.querySelectorAll(".hollow")];
  const named = (value) => Object.fromEntries(lines.map((node, i) => [figure.drawn.legend[i], value(node)]));
  found.dashes[at] = named((node) => node.getAttribute("stroke-dasharray"));
  found.hollow[at] = named((node) => hollow.filter((one) => one.classList[1] === node.classList[1]).length);
  if (svg.querySelector(".tinted")) found.tinted.push(at);
  for (const { words, box } of all) if (box.left < frame.left - 1 || box.right > frame.right + 1 || box.top < frame.top - 1 || box.bottom > frame.bottom + 1) found.cut.push(`${at}: ${words}`);
  all.forEach((one, i) => all.slice(i + 1).forEach((other) => {
    const wide = Math.min(one.box.right, other.box.right) - Math.max(one.box.left, other.box.left);
    const high = Math.min(one.box.bottom, other.box.bottom) - Math.max(one.box.top, other.box.top);
    if (wide > 1 && high > 4) found.overlapping.push(`${at}: ${one.words} / ${other.words}`); // lines of text have room above and below
  }));
}
for (const section of document.querySelectorAll("section")) {
  found.headings.push(section.querySelectorAll("h1, h2, h3, h4").length);
  found.sections.push(section.querySelector(".topic").textContent);
  const captions = [...section.querySelectorAll("figcaption")].filter((node) => node.clientWidth > 1);
  if (section.querySelectorAll("figure").length === 1) found.captions.push(...captions.map((node) => node.textContent));
}
for (const figure of shown) { // a picture to save has its legend inside
  const saved = new DOMParser().parseFromString(figure.picture(), "image/svg+xml").documentElement, wide = saved.viewBox.baseVal.width;
  for (const node of saved.children) if (node.tagName === "text" && node !== saved.querySelector("text") && Number(node.getAttribute("x")) + 6 * node.textContent.length > wide) found.cut.push("saved: " + node.textContent);
}
found.lead = document.querySelector(".lead .tiles")?.getBoundingClientRect().bottom;
found.height = document.documentElement.scrollHeight;
found.numbers = [...document.querySelectorAll(".tiles dd, .cards td")].flatMap((node) => { // a number on two lines
  const text = node.firstChild; if (!text || text.nodeType !== 3) return [];
  return [...text.data.matchAll(/[\d][\d.,]*/g)].filter((match) => {
    const range = document.createRange(); range.setStart(text, match.index); range.setEnd(text, match.index + match[0].length);
    return new Set([...range.getClientRects()].map((box) => box.top)).size > 1;
  }).map((match) => match[0]);
});
found.open = document.querySelectorAll("details[open]").length;
found.folded = [...document.querySelectorAll("details figure")].map((node) => node.dataset.plot);
found.cards = [...document.querySelectorAll(".cards details summary")].map((node) => node.textContent);
found.worthless = [...document.querySelectorAll(".cards .worthless strong")].map((node) => node.textContent);
return found;
