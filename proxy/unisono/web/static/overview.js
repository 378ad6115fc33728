// Overview: models, deployments, their load, the last hour, and the latest recordings.

import { json, reason } from "/page/api.js";
import { complaint, counted, day, el, field, number, seconds, svg, table, tell } from "/page/dom.js";
import { renew } from "/page/renew.js";

const EVERY_MS = 3000;
// Number of deployments from which a filter is shown.
const MANY = 12;
const STATES = {
  ready: "receives requests",
  unknown: "not probed yet",
  "half-open": "cooldown ended, next request is a trial",
  resting: "in cooldown after repeated failures",
  failing: "last probe failed",
  unfit: "probe found a blocking problem",
};

export function overview(main) {
  const parts = {
    sums: el("div", { class: "sums", hidden: true }),
    models: el("div"),
    rules: el("div"),
    recent: el("div"),
  };
  const trouble = complaint();
  const waiting = el("p", { class: "empty late" }, "Loading …");
  const sought = el("input", { type: "search", spellcheck: "false", autocapitalize: "off" });
  const unwell = el("input", { type: "checkbox" });
  const seeking = el("form", { class: "inline seeking", hidden: true, "aria-label": "Filter deployments" },
    field("Model or deployment", sought), el("label", { class: "check" }, unwell, " Only deployments that are not ready"));
  let last = null;
  const redraw = () => last && draw(parts, ...last, { text: sought.value.trim().toLowerCase(), unwell: unwell.checked });
  seeking.addEventListener("input", redraw);
  seeking.addEventListener("submit", (event) => event.preventDefault());
  const pause = el("button", { type: "button", class: "small", "aria-pressed": "false" }, "Pause");
  pause.addEventListener("click", () => {
    const paused = pause.getAttribute("aria-pressed") !== "true";
    pause.setAttribute("aria-pressed", String(paused));
    pause.textContent = paused ? "Paused" : "Pause";
  });
  main.append(
    el("div", { class: "heading" }, el("h1", {}, "Overview"), pause),
    trouble,
    waiting,
    parts.sums,
    section("models", "Models and deployments", seeking, parts.models),
    section("rules", "Recoveries in the last hour", parts.rules),
    section("recent", "Recent recordings", parts.recent),
  );
  let timer = 0;
  let gone = false;
  let first = true;
  async function look() {
    try {
      if (first || (!document.hidden && pause.getAttribute("aria-pressed") !== "true")) {
        const quiet = !first;
        first = false;
        const status = await json("/v1/status", { quiet });
        const recorded = status.traces === "off" ? null : (await json("/v1/traces?limit=20", { quiet: true })).data;
        if (gone) return;
        last = [status, recorded];
        seeking.hidden = sum(status.models.map((model) => model.deployments?.length ?? 1)) < MANY;
        redraw();
        waiting.remove();
        parts.sums.hidden = false;
        for (const hidden of main.querySelectorAll("section[hidden]")) hidden.hidden = false;
        tell(trouble, "");
      }
    } catch (error) {
      waiting.remove();
      // Written once: a repeated alert is read out again by screen readers.
      const why = reason(error) + (last ? ` The data below is from ${day(last[0].at)}.` : "");
      if (trouble.textContent !== why) tell(trouble, why);
    }
    if (!gone) timer = setTimeout(look, EVERY_MS);
  }
  look();
  return () => {
    gone = true;
    clearTimeout(timer);
  };
}

function section(id, title, ...children) {
  return el("section", { "aria-labelledby": `h-${id}`, hidden: true }, el("h2", { id: `h-${id}` }, title), children);
}

function draw(parts, status, recorded, seeking) {
  const whole = status.minutes !== undefined;
  const groups = status.models.filter((model) => model.id === model.model);
  renew(parts.sums, ...sums(status, groups, whole));
  renew(parts.models, whole ? deployed(groups, seeking) : plainModels(status, seeking), aliases(status));
  renew(parts.rules, whole ? rules(status) : el("p", { class: "empty" }, "Visible with the master key only."));
  renew(parts.recent, recent(recorded, status));
}

function sum(values) {
  return values.reduce((total, value) => total + value, 0);
}

function sums(status, groups, whole) {
  const fact = (name, value, more) =>
    el("div", { class: "sum" }, el("span", { class: "name" }, name), el("strong", {}, value), el("span", { class: "muted" }, more));
  const ready = groups.filter((model) => model.ready).length;
  const working = `${number(ready)} of ${number(groups.length)}`;
  if (!whole) return [fact("Available models", working, `version ${status.version}`)];
  const deployments = groups.flatMap((model) => model.deployments);
  const answers = sum(status.minutes.map((minute) => minute.answers));
  const failed = sum(status.minutes.map((minute) => minute.failed));
  const mended = sum(status.minutes.flatMap((minute) => Object.values(minute.recoveries)));
  const running = sum(deployments.map((one) => one.running));
  const fit = deployments.filter((one) => one.state === "ready").length;
  return [
    fact("Available models", working, `${number(fit)} of ${counted(deployments.length, "deployment")} ready`),
    fact("In flight", number(running), counted(sum(deployments.map((one) => one.tokens)), "token")),
    fact("Waiting", number(sum(groups.map((model) => model.waiting))), "for a slot"),
    fact("Answers, last hour", number(answers), failed ? `${number(failed)} failed` : "none failed"),
    fact("Recoveries, last hour", number(mended), status.workers > 1 ? `this worker, one of ${status.workers}` : "this process"),
  ];
}

function state(one) {
  return el(
    "span",
    { class: `state is-${one.state}` },
    el("span", { class: "dot", "aria-hidden": "true" }),
    el("span", {}, one.state),
  );
}

// One table for all models, so that columns align; each model has a group of rows.
function deployed(groups, { text, unwell }) {
  const heads = ["Deployment", "State", ["In flight", "n"], ["Tokens in flight", "n"], ["Prefix hits", "n"], ["Generations, 1 h", "n"], ["Tokens out, 1 h", "n"]];
  const found = groups.flatMap((model) => {
    const named = model.id.toLowerCase().includes(text);
    const fits = (one) => (named || one.name.toLowerCase().includes(text)) && !(unwell && one.state === "ready");
    const shown = model.deployments.filter(fits);
    return shown.length || (named && !unwell) ? [{ model, shown }] : [];
  });
  const rows = sum(found.map(({ shown }) => shown.length));
  return table("Deployments", heads, found.map(({ model, shown }) => group(model, shown, heads.length)), groups.length ? "No deployment matches." : "No models to show.", rows > 2 * MANY);
}

function group(model, shown, wide) {
  const rows = shown.map((one) => {
    const hour = one.hour;
    const hits = hour && hour.prompt ? `${Math.round((100 * hour.cached) / hour.prompt)} %` : "–";
    const told = [STATES[one.state], one.reason].filter(Boolean).join(": ");
    const why = `${told}, for ${seconds(Math.max(1, Math.round(one.since_s)))}`;
    const rest = one.rests_s ? `; cooldown ends in ${seconds(one.rests_s)}` : "";
    return [
      el("span", {}, el("strong", { class: "named" }, one.name), " ", el("span", { class: "muted" }, one.kind)),
      el("span", {}, state(one), " ", el("span", { class: "muted why" }, why + rest)),
      number(one.running) + (one.foreign ? ` + ${number(one.foreign)} of other clients` : ""),
      number(one.tokens),
      hits,
      hour ? number(hour.generations) + (hour.failed ? ` (${number(hour.failed)} failed)` : "") : "0",
      hour ? number(hour.generated) : "0",
    ];
  });
  const told = [
    model.context ? `${number(model.context)} tokens of context` : "context size not known yet",
    model.waiting ? `${number(model.waiting)} waiting` : null,
    model.deployments.length > 1 ? `${number(model.deployments.filter((one) => one.state === "ready").length)} of ${number(model.deployments.length)} ready` : null,
  ];
  const name = [el("span", { class: "group" }, model.id), " ", el("span", { class: "muted" }, told.filter(Boolean).join(" · "))];
  const head = el("th", { scope: "rowgroup", colspan: wide }, el("span", { class: "stays" }, name));
  return { key: model.id, head, rows };
}

function plainModels(status, { text, unwell }) {
  const fits = (model) => model.id.toLowerCase().includes(text) && !(unwell && model.ready);
  const rows = status.models.filter(fits).map((model) => [model.id, state({ state: model.ready ? "ready" : "failing" }), number(model.context)]);
  const empty = status.models.length ? "No model matches." : "This key has no access to any model.";
  return table("Models of this key", ["Model", "State", ["Context", "n"]], rows, empty, rows.length > 2 * MANY);
}

function aliases(status) {
  const others = status.models.filter((model) => model.id !== model.model);
  if (!others.length || status.minutes === undefined) return "";
  return el("p", { class: "muted" }, "Aliases: ", others.map((model) => `${model.id} → ${model.model}`).join(", "));
}

function rules(status) {
  const names = new Set(status.minutes.flatMap((minute) => Object.keys(minute.recoveries)));
  const now = Math.floor(status.at / 60) * 60;
  const rows = [...names]
    .map((rule) => {
      const counts = new Array(60).fill(0);
      for (const minute of status.minutes) {
        const ago = (now - minute.at) / 60;
        if (ago >= 0 && ago < 60) counts[59 - ago] += minute.recoveries[rule] ?? 0;
      }
      return { rule, counts, total: sum(counts) };
    })
    .sort((one, other) => other.total - one.total)
    .map(({ rule, counts, total }) => ({ key: rule, cells: [
      el("span", {}, el("code", { class: "rule" }, rule), el("br"), el("span", { class: "muted why" }, status.rules[rule] ?? "")),
      number(total),
      strip(counts),
    ] }));
  return table("Recoveries by rule", ["Rule", ["Times", "n"], "60 minutes"], rows, "No recoveries in the last hour.");
}

function strip(counts) {
  const most = Math.max(...counts, 1);
  const bars = counts.map((count, at) => {
    const height = count ? Math.max(3, (24 * count) / most) : 1;
    return svg("rect", { x: at * 4, y: 26 - height, width: 3, height, class: count ? "bar-some" : "bar-none" });
  });
  const ago = counts.length - 1 - counts.findLastIndex((count) => count > 0);
  const last = ago ? `last ${ago} min ago` : "last in the current minute";
  return svg("svg", { viewBox: "0 0 240 27", class: "strip", role: "img", "aria-label": last }, svg("title", {}, last), bars);
}

function recent(recorded, status) {
  if (recorded === null) {
    return el("p", { class: "empty" }, "Recording is off. Set ", el("code", {}, "unisono.traces.mode"), " to turn it on.");
  }
  const rows = recorded.map((one) => {
    const ended = one.error || one.finish || one.outcome;
    const mended = one.recoveries.map((rule) => el("code", { class: "rule", title: status.rules[rule] }, rule));
    if (one.failovers) mended.push(el("code", { class: "rule" }, "failover"));
    return { key: one.id, cells: [
      el("a", { href: `#/inspector/${encodeURIComponent(one.id)}` }, day(one.at)),
      el("span", { class: one.error ? "bad" : undefined }, ended),
      el("span", { class: "chips" }, mended.length ? mended : "–"),
      number(one.generated),
      seconds(one.ended_s),
      one.model,
      one.surface,
      one.backend,
    ] };
  });
  return table(
    "Recordings of this key's tenant",
    ["Time", "Outcome", "Recoveries", ["Tokens", "n"], ["Duration", "n"], "Model", "API", "Backend"],
    rows,
    status.traces === "all" ? "No answers recorded yet." : "No answers recorded yet: only those with recoveries or failures are.",
  );
}
