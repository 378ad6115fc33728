// Tables of models and deployments with their health and load.

import { el, table } from "/page/lib/dom.js";
import { number, seconds } from "/page/lib/format.js";

// Number of rows from which a table scrolls.
const MANY = 24;
const STATES = {
  ready: "receives requests",
  unknown: "not probed yet",
  "half-open": "cooldown ended, the next request is a trial",
  resting: "in cooldown after repeated failures",
  failing: "last probe failed",
  unfit: "a probe found a blocking problem",
  quarantined: "receives requests only if no other deployment works",
  shadow: "gets copies of another deployment's requests, and its answers are not used",
  drained: "receives no new requests until it is resumed",
};

export function sum(values) {
  return values.reduce((total, value) => total + (value ?? 0), 0);
}

// Models without their aliases.
export function groupsOf(status) {
  return status.models.filter((model) => model.id === model.model);
}

function stateOf(one) {
  return el("span", { class: `state is-${one.state}` }, el("span", { class: "dot", "aria-hidden": "true" }), el("span", {}, one.state));
}

export function why(one) {
  const told = [...new Set([STATES[one.state], one.cause || one.reason])].filter(Boolean).join(": ");
  const rest = one.rests_s ? `; cooldown ends in ${seconds(one.rests_s)}` : "";
  return `${told}, for ${seconds(Math.max(1, Math.round(one.since_s)))}${rest}`;
}

// One table for all models, so that columns align; each model has a group of rows. `extra` adds cells.
export function deploymentTable(status, { text, unwell }, extra) {
  const heads = ["Deployment", "State", ["In flight", "n"], ["Tokens in flight", "n"], ["Prefix hits, 1 h", "n"], ["Generations, 1 h", "n"], ["Tokens out, 1 h", "n"], ...(extra ? [extra.head] : [])];
  const groups = groupsOf(status);
  const found = groups.flatMap((model) => {
    const named = model.id.toLowerCase().includes(text);
    const fits = (one) => (named || one.name.toLowerCase().includes(text)) && !(unwell && one.state === "ready");
    const shown = model.deployments.filter(fits);
    return shown.length || (named && !unwell) ? [{ model, shown }] : [];
  });
  const rows = sum(found.map(({ shown }) => shown.length));
  const aliases = status.models.filter((model) => model.id !== model.model);
  return table("Deployments", heads, found.map(({ model, shown }) => group(model, shown, heads.length, extra, aliases)), groups.length ? "No deployment matches." : "No models are configured.", rows > MANY);
}

function group(model, shown, wide, extra, aliases) {
  const rows = shown.map((one) => {
    const hour = one.hour;
    const hits = hour && hour.prompt ? `${Math.round((100 * hour.cached) / hour.prompt)} %` : "–";
    // Each row has buttons for its deployment, so the row must have a key.
    return { key: one.name, cells: [
      el("span", {}, el("strong", { class: "named" }, one.name), " ", el("span", { class: "muted" }, one.kind)),
      el("span", {}, stateOf(one), " ", el("span", { class: "muted why" }, why(one))),
      number(one.running) + (one.foreign ? ` + ${number(one.foreign)} of other clients` : ""),
      number(one.tokens),
      hits,
      hour ? number(hour.generations) + (hour.failed ? ` (${number(hour.failed)} failed)` : "") : "0",
      hour ? number(hour.generated) : "0",
      ...(extra ? [extra.cell(model, one)] : []),
    ] };
  });
  const others = aliases.filter((alias) => alias.model === model.id).map((alias) => alias.id);
  const told = [
    model.context ? `${number(model.context)} tokens of context` : model.mode === "chat" ? "context size not known yet" : model.mode,
    model.waiting ? `${number(model.waiting)} waiting` : null,
    model.deployments.length > 1 ? `${number(model.deployments.filter((one) => one.state === "ready").length)} of ${number(model.deployments.length)} ready` : null,
    others.length ? `also ${others.join(", ")}` : null,
  ];
  const name = [el("span", { class: "group" }, model.id), " ", el("span", { class: "muted" }, told.filter(Boolean).join(" · "))];
  const head = el("th", { scope: "rowgroup", colspan: wide }, el("span", { class: "stays" }, name));
  return { key: model.id, head, rows };
}

export function plainModels(status, { text, unwell }) {
  const fits = (model) => model.id.toLowerCase().includes(text) && !(unwell && model.ready);
  const rows = status.models.filter(fits).map((model) => [model.id, stateOf({ state: model.ready ? "ready" : "failing" }), number(model.context)]);
  const none = status.models.length ? "No model matches." : "This key has no access to any model.";
  return table("Models of this key", ["Model", "State", ["Context", "n"]], rows, none, rows.length > MANY);
}
