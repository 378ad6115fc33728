// Page shell: current view, connection, theme, keyboard shortcuts.

import { dialog, el, say } from "/page/lib/dom.js";
import { whenSignedIn } from "/page/lib/session.js";
import { refresh, state, watch } from "/page/lib/store.js";
import { overview } from "/page/views/overview.js";

// Views other than the first are loaded when they are opened.
const VIEWS = {
  overview: { title: "Overview", load: async () => overview },
  requests: { title: "Requests", load: async () => (await import("/page/views/requests.js")).requests },
  playground: { title: "Playground", load: async () => (await import("/page/views/playground.js")).playground },
  inspector: { title: "Inspector", load: async () => (await import("/page/views/inspector.js")).inspector },
  models: { title: "Models", load: async () => (await import("/page/views/models.js")).models },
  keys: { title: "Keys", load: async () => (await import("/page/views/keys.js")).keys },
  reference: { title: "API reference", load: async () => (await import("/page/views/reference.js")).reference },
};
// View names of earlier versions, and the addresses that replace them.
const MOVED = { usage: "keys/spend" };
// `/docs` is the same page, which opens with the reference.
const FIRST = location.pathname === "/docs" ? "reference" : "overview";
const byId = (id) => document.getElementById(id);
const main = byId("main");
let leave = () => {};
let shown = null;
let opening = 0;

async function go() {
  const [, name = "", rest = "", search = ""] = /^#\/([a-z]*)\/?([^?]*)\??(.*)$/.exec(location.hash) ?? [];
  if (Object.hasOwn(MOVED, name)) {
    location.replace(`#/${MOVED[name]}`);
    return;
  }
  const view = Object.hasOwn(VIEWS, name) ? name : FIRST;
  opening += 1;
  const own = opening;
  const first = shown === null;
  shown = view;
  document.title = `${VIEWS[view].title} · Unisono`;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.dataset.view === view) {
      link.setAttribute("aria-current", "page");
      link.scrollIntoView({ block: "nearest", inline: "nearest" });
    } else link.removeAttribute("aria-current");
  }
  const show = await VIEWS[view].load().catch(() => null);
  if (own !== opening) return;
  leave();
  main.replaceChildren();
  main.className = `view-${view}`;
  if (!show) {
    leave = () => {};
    main.append(el("p", { class: "trouble", role: "alert" }, "This view could not be loaded. Reload the page when the gateway answers again."));
    return;
  }
  const left = show(main, decoded(rest), new URLSearchParams(search));
  leave = typeof left === "function" ? left : () => {};
  if (!first) {
    main.focus({ preventScroll: true });
    scrollTo(0, 0);
  }
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

function showOffline({ reachable, trouble }) {
  const offline = byId("offline");
  const lost = !reachable || (trouble && !trouble.status);
  const words = lost ? "The gateway does not answer. Reconnecting …" : "";
  if (offline.textContent !== words) offline.textContent = words;
  offline.hidden = !lost;
}

// -- the theme

const THEMES = ["auto", "light", "dark"];
const themeButton = byId("theme");

function themed(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  themeButton.textContent = `Theme: ${theme}`;
  dispatchEvent(new Event("themed"));
}

function nextTheme() {
  const next = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme ?? "auto") + 1) % THEMES.length];
  themed(next);
  try {
    localStorage.setItem("unisono.theme", next);
  } catch {
    // Storage failed: the choice applies until the page is closed.
  }
}

themeButton.addEventListener("click", nextTheme);

// -- keyboard shortcuts

const GOTO = { o: "overview", r: "requests", p: "playground", i: "inspector", m: "models", k: "keys", a: "reference" };
let chord = 0;

function help() {
  if (document.querySelector("dialog[open]")) return;
  const rows = [
    ...Object.entries(GOTO).map(([key, view]) => [["g", key], VIEWS[view].title]),
    [["/"], "Search or filter"], [["t"], "Next theme"], [["?"], "Show this list"],
    [["Ctrl", "Enter"], "Send, in the playground"], [["Esc"], "Stop the answer, or close a dialog"],
    [["←", "→"], "Previous and next token, in the inspector"], [["j", "k"], "Next and previous recording, in the inspector"],
  ];
  dialog("Keyboard shortcuts", () => el("dl", { class: "shortcuts" }, rows.map(([keys, what]) =>
    el("div", {}, el("dt", {}, keys.map((key) => el("kbd", {}, key))), el("dd", {}, what)))));
}

addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.isComposing) return;
  if (event.target.closest?.("input, textarea, select, [contenteditable]") || document.querySelector("dialog[open]")) return;
  if (performance.now() < chord && Object.hasOwn(GOTO, event.key)) {
    chord = 0;
    location.hash = `#/${GOTO[event.key]}`;
    return;
  }
  chord = 0;
  if (event.key === "g") chord = performance.now() + 1500;
  else if (event.key === "?") help();
  else if (event.key === "t") nextTheme();
  else if (event.key === "/") {
    const field = main.querySelector("[type='search'], [data-search]");
    if (!field) return;
    field.closest("details")?.setAttribute("open", "");
    field.focus();
  } else return;
  event.preventDefault();
});
byId("help").addEventListener("click", help);

themed(document.documentElement.dataset.theme ?? "auto");
watch(showOffline);
showOffline(state);
whenSignedIn(go);
addEventListener("hashchange", go);
document.querySelector(".skip").addEventListener("click", (event) => { event.preventDefault(); main.focus(); });
document.addEventListener("visibilitychange", () => { if (!document.hidden && state.status) refresh(); });
go();
refresh({ quiet: false });
say("");
