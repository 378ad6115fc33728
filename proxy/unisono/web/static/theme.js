// Sets the chosen theme before the first paint, so that the other theme never flashes. A module would run too late.
(() => {
  try {
    const chosen = localStorage.getItem("unisono.theme");
    if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
  } catch {
    // Without storage, the theme of the system applies.
  }
})();
