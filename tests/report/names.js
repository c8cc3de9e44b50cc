// Body of an async function: names of layers, GIVEN and invented, as they are shortened to so many letters.
let state = 7;
const next = (n) => Math.floor(((state = (state * 1664525 + 1013904223) % 2 ** 32) / 2 ** 32) * n);
const PARTS = ["0", "11", "encoder", "encodes", "a", "…", "weight", "é…", "\n", "x".repeat(40)];
const made = [];
for (const n of [8, 14, 20, 28, 40]) for (let again = 0; again < 40; again++) {
  const name = () => Array.from({ length: 1 + next(6) }, () => PARTS[next(PARTS.length)]).join(".");
  const names = [...new Set(Array.from({ length: 25 }, name))], short = shortened(names, n);
  made.push([names.length, new Set(short).size, new Set(onAxis(names, n)).size, n, Math.max(...short.map((one) => [...one].length))]);
}
return { made, given: [20, 33, 99].map((n) => onAxis(GIVEN, n)) };
