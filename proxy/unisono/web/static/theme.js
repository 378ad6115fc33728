// Runs before anything is drawn, so that a chosen theme does not flash; not a module for that reason.
(() => {
  try {
    const chosen = localStorage.getItem("unisono.theme");
    if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
  } catch {
    // Without storage the system's choice stands.
  }
})();
