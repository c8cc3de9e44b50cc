// Runs before everything else on the page.
window.faults = [];
addEventListener("error", (event) => faults.push("error: " + (event.message || event.target?.src)), true);
addEventListener("unhandledrejection", (event) => faults.push("rejected: " + event.reason));
addEventListener("securitypolicyviolation", (event) => faults.push("blocked: " + event.blockedURI + " " + event.violatedDirective));
for (const level of ["error", "warn"]) { const old = console[level]; console[level] = (...a) => { faults.push(level + ": " + a.join(" ")); old(...a); }; }
