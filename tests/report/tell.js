// Waits for the page, runs STEPS, and leaves what they found where the test reads it.
addEventListener("load", async () => {
  let seen = null;
  try { seen = await (async () => { STEPS(); })(); } catch (error) { faults.push("script: " + error.stack); }
  const found = JSON.stringify({ faults, seen, width: innerWidth, scroll: document.documentElement.scrollWidth });
  if (parent !== window) parent.postMessage(found, "*");
  else { const pre = document.createElement("pre"); pre.id = "found"; pre.textContent = found; document.body.append(pre); }
});
