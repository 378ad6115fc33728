// Page shell: current view, key, theme.

import { hasKey, json, useKey, whenRefused } from "/page/api.js";
import { el, say, visible } from "/page/dom.js";
import { overview } from "/page/overview.js";
import { playground } from "/page/playground.js";
import { inspector } from "/page/inspector.js";
import { usage } from "/page/usage.js";
import { reference } from "/page/reference.js";

const VIEWS = {
  overview: { title: "Overview", show: overview },
  playground: { title: "Playground", show: playground },
  inspector: { title: "Inspector", show: inspector },
  usage: { title: "Usage", show: usage },
  reference: { title: "API reference", show: reference },
};
// `/docs` is the same page, which opens with the reference.
const FIRST = location.pathname === "/docs" ? "reference" : "overview";
const byId = (id) => document.getElementById(id);
const main = byId("main");
let leave = () => {};
let shown = null;

function go() {
  const [, name = "", rest = ""] = /^#\/([a-z]*)\/?(.*)$/.exec(location.hash) ?? [];
  const view = Object.hasOwn(VIEWS, name) ? name : FIRST;
  leave();
  const first = shown === null;
  shown = view;
  document.title = `${VIEWS[view].title} · Unisono`;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.dataset.view === view) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  main.replaceChildren();
  const left = VIEWS[view].show(main, decoded(rest));
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

// -- the key

const dialog = byId("ask-key");
const keyField = byId("key-field");
let answered = [];

function askKey(why) {
  const wrong = hasKey() && why;
  byId("key-why").replaceChildren(
    visible(wrong ? why : "The gateway requires a key. It is sent in the Authorization header only."),
  );
  byId("key-why").className = wrong ? "trouble" : "muted";
  byId("key-forget").hidden = !hasKey();
  byId("key-keep").checked = true;
  keyField.value = "";
  if (!dialog.open) dialog.showModal();
  keyField.focus();
  return new Promise((resolve) => answered.push(resolve));
}

function answer(given) {
  const waiting = answered;
  answered = [];
  dialog.close();
  showKey();
  for (const resolve of waiting) resolve(given);
}

function showKey() {
  byId("key").textContent = hasKey() ? "Key: set" : "Key";
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const given = keyField.value.trim();
  keyField.value = "";
  if (!given) return;
  const waited = answered.length > 0 && shown !== null;
  useKey(given, byId("key-keep").checked);
  answer(true);
  if (!waited) go();
});
byId("key-forget").addEventListener("click", () => { useKey("", false); answer(false); say("The key was removed"); });
byId("key-close").addEventListener("click", () => answer(false));
dialog.addEventListener("cancel", (event) => { event.preventDefault(); answer(false); });
byId("key").addEventListener("click", async () => { if (await askKey("")) go(); });
whenRefused((why) => askKey(why));

// -- the theme

const THEMES = ["auto", "light", "dark"];
const themeButton = byId("theme");

function themed(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  themeButton.textContent = `Theme: ${theme}`;
}

themeButton.addEventListener("click", () => {
  const next = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme ?? "auto") + 1) % THEMES.length];
  themed(next);
  try {
    localStorage.setItem("unisono.theme", next);
  } catch {
    // The choice lasts as long as the page is open.
  }
});

themed(document.documentElement.dataset.theme ?? "auto");
showKey();
addEventListener("hashchange", go);
document.querySelector(".skip").addEventListener("click", (event) => { event.preventDefault(); main.focus(); });
json("/v1/status", { quiet: true }).then(
  (status) => {
    if (!status.keyless) return;
    byId("key").replaceWith(el("span", { class: "muted small-text" }, "No key needed"));
  },
  () => {},
);
go();
