// State that views share: the status of the gateway, which one poller reads, and whether the gateway can be reached.

import { json, Refused, whenContacted } from "/page/lib/api.js";

const EVERY_MS = 3000;
const RETRY_MS = 1000;

export const state = {
  status: null,
  trouble: null,
  reachable: true,
  paused: false,
};
const watchers = new Set();
let timer = 0;
let reading = false;

// Calls `changed` with every new state. Returns a function that ends these calls.
export function watch(changed) {
  watchers.add(changed);
  if (state.status || state.trouble) changed(state);
  return () => watchers.delete(changed);
}

function tellAll() {
  for (const changed of [...watchers]) changed(state);
}

export function role() {
  return state.status?.role ?? "";
}

// Admins can see and change all keys and requests. Viewers can see them, but not change them.
export const seesAll = () => ["master", "admin", "viewer"].includes(role());
export const changesAll = () => ["master", "admin"].includes(role());

export function recorded(unisono) {
  const mode = state.status?.traces;
  const mended = (unisono?.recoveries ?? []).some((rule) => rule !== "restored-stop");
  return mode === "all" || (mode === "recoveries" && (mended || unisono?.failovers || unisono?.unmet));
}

whenContacted((reachable) => {
  if (reachable === state.reachable) return;
  state.reachable = reachable;
  tellAll();
});

// Reads the status now. The first read may ask for a key, later ones never do. While the gateway
// cannot be reached, other requests wait until this read succeeds.
export async function refresh({ quiet = true } = {}) {
  if (reading) return;
  reading = true;
  clearTimeout(timer);
  try {
    state.status = await json("/v1/status", { quiet, reads: false });
    state.trouble = null;
  } catch (error) {
    state.trouble = error;
  }
  reading = false;
  tellAll();
  // While the gateway cannot be reached, retry quickly, so that a restarted gateway is soon found.
  const retries = state.trouble && !(state.trouble instanceof Refused);
  timer = setTimeout(next, retries ? RETRY_MS : EVERY_MS);
}

function next() {
  if ((state.paused && state.reachable) || document.hidden) timer = setTimeout(next, RETRY_MS);
  else refresh();
}

export function forget() {
  Object.assign(state, { status: null, trouble: null });
}
