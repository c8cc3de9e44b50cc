// Body of an async function: what is drawn.
const figures = [...document.querySelectorAll("figure[data-plot]")], of = (key) => figures.find((f) => f.dataset.plot.endsWith(key));
const lines = (figure) => figure.querySelectorAll(".plot > svg .line").length;
const seen = { figures: figures.length, drawn: figures.filter((f) => f.querySelector(".plot > svg, .cards")).length };
seen.scale = Math.min(...figures.filter((f) => f.drawn).map((f) => f.drawn.svg.clientWidth / f.drawn.svg.viewBox.baseVal.width));
