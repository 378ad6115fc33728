// Runs before the first paint, so that a chosen theme does not flash; therefore it is not a module.
(() => {
  try {
    const chosen = localStorage.getItem("unisono.theme");
    if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
  } catch {
    // Without storage the system's choice applies.
  }
})();
