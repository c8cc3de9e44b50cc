// Names of layers in, names that fit an axis out, as in sipp/results/words.py: those that differ stay different.
function cut(name, n) { // in the middle
  const all = [...name];
  return all.length <= n ? name : all.slice(0, Math.ceil(n / 2) - 1).join("") + "…" + all.slice(all.length - Math.floor(n / 2)).join("");
}
function initials(name, n) { // parts from the left become their first letter and their number, as many as needed;
  // those before the number of a block always do, so that all blocks of a network begin alike
  const parts = name.split("."), length = () => [...parts.join(".")].length, head = parts.findIndex((part) => /^[0-9]+$/.test(part));
  for (let i = 0; i < parts.length - 1 && (i < head || length() > n); i++) parts[i] = parts[i].replace(/^([^0-9]).*?([0-9]*)$/su, "$1$2");
  return cut(parts.join("."), n);
}
function numbered(names, n) { // the last resort: a number at the end
  const taken = new Set(names.filter((name) => [...name].length <= n));
  return names.map((name, i) => {
    if (taken.has(name)) return name;
    let k = i + 1, text;
    do text = [...initials(name, n)].slice(0, Math.max(0, n - 1 - String(k).length)).join("") + `…${k++}`; while (taken.has(text));
    taken.add(text);
    return text;
  });
}
function shortened(names, n) {
  const differ = new Set(names).size;
  const tried = [cut, initials].map((way) => names.map((name) => way(name, n)));
  return tried.find((texts) => new Set(texts).size === differ) || numbered(names, n);
}
function onAxis(names, n) { // without the end that nearly every name has
  const bare = names.map((name) => name.replace(/(\D.*)\.weight(?= |$)/, "$1"));
  return shortened(new Set(bare).size === new Set(names).size ? bare : names, n);
}
