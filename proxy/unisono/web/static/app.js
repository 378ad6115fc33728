// Page shell: current view, session, theme, keyboard shortcuts.

import { hasKey, useKey, whenRefused } from "/page/lib/api.js";
import { dialog, el, say, visible } from "/page/lib/dom.js";
import { ZONE } from "/page/lib/format.js";
import { forget, refresh, state, watch } from "/page/lib/store.js";
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
// Addresses of earlier versions.
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

// -- the session

const asking = byId("ask-key");
const keyField = byId("key-field");
const PLAIN_REASON = "The gateway requires a key. It is sent in the Authorization header only.";
let answered = [];

function askKey(why) {
  const wrong = hasKey() && why;
  byId("key-why").replaceChildren(visible(wrong ? `${why} It may have expired or been revoked.` : PLAIN_REASON));
  byId("key-why").className = wrong ? "trouble" : "muted";
  byId("key-keep").checked = true;
  keyField.value = "";
  if (!asking.open) asking.showModal();
  keyField.focus();
  return new Promise((resolve) => answered.push(resolve));
}

function answer(given) {
  const waiting = answered;
  answered = [];
  asking.close();
  for (const resolve of waiting) resolve(given);
}

byId("key-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const given = keyField.value.trim();
  keyField.value = "";
  if (!given) return;
  useKey(given, byId("key-keep").checked);
  forget();
  answer(true);
  // The new key may have another role, so the view is built again.
  await refresh({ quiet: false });
  if (state.status) go();
});
byId("key-close").addEventListener("click", () => answer(false));
asking.addEventListener("cancel", (event) => { event.preventDefault(); answer(false); });
byId("key").addEventListener("click", () => {
  if (!hasKey()) {
    askKey("");
    return;
  }
  // A reload removes everything that the views remember.
  useKey("", false);
  sessionStorage.clear();
  location.reload();
});
whenRefused((why) => askKey(why));

const ROLES = { master: "master key", admin: "admin", viewer: "viewer", team_admin: "team admin", user: "user", user_viewer: "user, read only", key: "key" };

function showSession({ status, reachable, trouble }) {
  const button = byId("key");
  button.hidden = Boolean(status?.keyless);
  button.textContent = hasKey() ? "Sign out" : "Sign in";
  const who = !status ? "" : status.keyless ? "No key needed" : `Signed in: ${status.key ?? ""} ${ROLES[status.role] ?? status.role}`.replace("  ", " ");
  byId("session").replaceChildren(visible(who), who ? " · " : "", el("span", { title: "Time zone of all times on this page" }, ZONE));
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
    // The choice lasts as long as the page is open.
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
    [["/"], "Search or filter"], [["t"], "Next theme"], [["?"], "This sheet"],
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
watch(showSession);
showSession(state);
addEventListener("hashchange", go);
document.querySelector(".skip").addEventListener("click", (event) => { event.preventDefault(); main.focus(); });
document.addEventListener("visibilitychange", () => { if (!document.hidden && state.status) refresh(); });
go();
refresh({ quiet: false });
say("");
