// Session: asks for a key, signs in and out, and displays who is signed in.

import { hasKey, useKey, whenRefused } from "/page/lib/api.js";
import { el, say } from "/page/lib/dom.js";
import { visible } from "/page/lib/invisible.js";
import { ZONE } from "/page/lib/format.js";
import { forget, refresh, state, watch } from "/page/lib/store.js";

const byId = (id) => document.getElementById(id);
const asking = byId("ask-key");
const keyField = byId("key-field");
const PLAIN_REASON = "The gateway requires a key. It is sent in the Authorization header only.";
let answered = [];
let reopen = () => {};

// Sets the function that builds the current view again after a sign-in.
export function whenSignedIn(opening) {
  reopen = opening;
}

function askKey(why) {
  const wrong = hasKey() && why;
  byId("key-why").replaceChildren(visible(wrong ? `${why} It may have expired or been revoked.` : PLAIN_REASON));
  byId("key-why").className = wrong ? "trouble" : "muted";
  byId("key-keep").checked = true;
  keyField.value = "";
  // The refused request does not run while the dialog is open.
  say("");
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
  if (state.status) reopen();
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

function showSession({ status }) {
  const button = byId("key");
  button.hidden = Boolean(status?.keyless);
  button.textContent = hasKey() ? "Sign out" : "Sign in";
  const who = !status ? "" : status.keyless ? "No key needed" : `Signed in: ${status.key ?? ""} ${ROLES[status.role] ?? status.role}`.replace("  ", " ");
  byId("session").replaceChildren(visible(who), who ? " · " : "", el("span", { title: "Time zone of all times on this page" }, ZONE));
}

watch(showSession);
showSession(state);
