// What the gateway is doing: models, deployments, their load, the last hour, and the last recordings.

import { json, Refused } from "/page/api.js";
import { day, el, number, seconds, svg, table } from "/page/dom.js";

const EVERY_MS = 3000;
const STATES = {
  ready: "gets requests",
  unknown: "not examined yet",
  "half-open": "rested, and is being tried",
  resting: "failed too often",
  failing: "its last probe failed",
  unfit: "not fit for use",
};

export function overview(main) {
  const parts = {
    sums: el("div", { class: "sums" }),
    models: el("div"),
    rules: el("div"),
    recent: el("div"),
  };
  const trouble = el("p", { class: "trouble", role: "alert", hidden: true });
  const pause = el("button", { type: "button", class: "small", "aria-pressed": "false" }, "Pause");
  pause.addEventListener("click", () => {
    const paused = pause.getAttribute("aria-pressed") !== "true";
    pause.setAttribute("aria-pressed", String(paused));
    pause.textContent = paused ? "Paused" : "Pause";
  });
  main.append(
    el("div", { class: "heading" }, el("h1", {}, "Overview"), pause),
    trouble,
    parts.sums,
    section("models", "Models and deployments", parts.models),
    section("rules", "Mended in the last hour", parts.rules),
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
        draw(parts, status, recorded);
        for (const hidden of main.querySelectorAll("section[hidden]")) hidden.hidden = false;
        trouble.hidden = true;
      }
    } catch (error) {
      trouble.textContent = error instanceof Refused ? error.message : "The gateway does not answer.";
      trouble.hidden = false;
    }
    if (!gone) timer = setTimeout(look, EVERY_MS);
  }
  look();
  return () => {
    gone = true;
    clearTimeout(timer);
  };
}

function section(id, title, part) {
  return el("section", { "aria-labelledby": `h-${id}`, hidden: true }, el("h2", { id: `h-${id}` }, title), part);
}

// Whoever stands in a part with the keyboard keeps their place until they leave it.
function put(part, ...children) {
  if (!part.contains(document.activeElement)) part.replaceChildren(...children);
}

function draw(parts, status, recorded) {
  const whole = status.minutes !== undefined;
  const groups = status.models.filter((model) => model.id === model.model);
  put(parts.sums, ...sums(status, groups, whole));
  put(parts.models, ...(whole ? groups.map(group) : [plainModels(status)]), aliases(status));
  put(parts.rules, whole ? rules(status) : el("p", { class: "empty" }, "Shown to the operator's own key."));
  put(parts.recent, recent(recorded, status));
}

function sum(values) {
  return values.reduce((total, value) => total + value, 0);
}

function sums(status, groups, whole) {
  const fact = (name, value, more) =>
    el("div", { class: "sum" }, el("span", { class: "name" }, name), el("strong", {}, value), el("span", { class: "muted" }, more));
  const ready = groups.filter((model) => model.ready).length;
  const all = [fact("Models that work", `${ready} of ${groups.length}`, `version ${status.version}`)];
  if (!whole) return all;
  const deployments = groups.flatMap((model) => model.deployments);
  const answers = sum(status.minutes.map((minute) => minute.answers));
  const failed = sum(status.minutes.map((minute) => minute.failed));
  const mended = sum(status.minutes.flatMap((minute) => Object.values(minute.recoveries)));
  const running = sum(deployments.map((one) => one.running));
  all.push(
    fact("In flight", number(running), `${number(sum(deployments.map((one) => one.tokens)))} tokens`),
    fact("Waiting", number(sum(groups.map((model) => model.waiting))), "for a place"),
    fact("Answers, last hour", number(answers), failed ? `${number(failed)} failed` : "none failed"),
    fact("Mended, last hour", number(mended), status.workers > 1 ? `this worker, one of ${status.workers}` : "this process"),
  );
  return all;
}

function state(one) {
  return el(
    "span",
    { class: `state is-${one.state}` },
    el("span", { class: "dot", "aria-hidden": "true" }),
    el("span", {}, one.state),
  );
}

function group(model) {
  const rows = model.deployments.map((one) => {
    const hour = one.hour;
    const hits = hour && hour.prompt ? `${Math.round((100 * hour.cached) / hour.prompt)} %` : "–";
    const why = one.reason || `${STATES[one.state] ?? ""}, for ${seconds(Math.max(1, Math.round(one.since_s)))}`;
    const rest = one.rests_s ? `; rests ${seconds(one.rests_s)} more` : "";
    return [
      el("span", {}, el("strong", {}, one.name), el("br"), el("span", { class: "muted" }, one.kind)),
      el("span", {}, state(one), el("br"), el("span", { class: "muted why" }, why + rest)),
      number(one.running) + (one.foreign ? ` + ${number(one.foreign)} of others` : ""),
      number(one.tokens),
      hits,
      hour ? number(hour.generations) + (hour.failed ? ` (${number(hour.failed)} failed)` : "") : "0",
      hour ? number(hour.generated) : "0",
    ];
  });
  const told = `${model.context ? `${number(model.context)} tokens of context` : "context not known yet"}, ${number(model.waiting)} waiting`;
  return el(
    "div",
    { class: "group" },
    el("h3", {}, model.id, " ", el("span", { class: "muted" }, told)),
    table(
      `Deployments of ${model.id}`,
      ["Deployment", "State", ["In flight", "n"], ["Tokens in flight", "n"], ["Prefix hits", "n"], ["Generations, 1 h", "n"], ["Tokens out, 1 h", "n"]],
      rows,
      "No deployments.",
    ),
  );
}

function plainModels(status) {
  const rows = status.models.map((model) => [model.id, state({ state: model.ready ? "ready" : "failing" }), number(model.context)]);
  return table("Models of this key", ["Model", "State", ["Context", "n"]], rows, "This key may use no model.");
}

function aliases(status) {
  const others = status.models.filter((model) => model.id !== model.model);
  if (!others.length || status.minutes === undefined) return "";
  return el("p", { class: "muted" }, "Also known as: ", others.map((model) => `${model.id} → ${model.model}`).join(", "));
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
    .map(({ rule, counts, total }) => [
      el("span", {}, el("code", { class: "rule" }, rule), el("br"), el("span", { class: "muted why" }, status.rules[rule] ?? "")),
      number(total),
      strip(counts),
    ]);
  return table("Recoveries by rule", ["Rule", ["Times", "n"], "60 minutes"], rows, "Nothing had to be mended.");
}

function strip(counts) {
  const most = Math.max(...counts, 1);
  const bars = counts.map((count, at) => {
    const height = count ? Math.max(3, (24 * count) / most) : 1;
    return svg("rect", { x: at * 4, y: 26 - height, width: 3, height, class: count ? "bar-some" : "bar-none" });
  });
  return svg("svg", { viewBox: "0 0 240 27", class: "strip", "aria-hidden": "true", focusable: "false" }, bars);
}

function recent(recorded, status) {
  if (recorded === null) {
    return el("p", { class: "empty" }, "Recordings are off. ", el("code", {}, "unisono.traces.mode"), " switches them on.");
  }
  const rows = recorded.map((one) => {
    const ended = one.error || one.finish || one.outcome;
    const mended = one.recoveries.map((rule) => el("code", { class: "rule", title: status.rules[rule] }, rule));
    if (one.failovers) mended.push(el("code", { class: "rule" }, "failover"));
    return [
      el("a", { href: `#/inspector/${encodeURIComponent(one.id)}` }, day(one.at)),
      el("span", { class: one.error ? "bad" : undefined }, ended),
      el("span", { class: "chips" }, mended.length ? mended : "–"),
      number(one.generated),
      seconds(one.ended_s),
      one.model,
      one.surface,
      one.backend,
    ];
  });
  return table(
    "Recordings of this key's tenant",
    ["Time", "Ended", "Mended", ["Tokens", "n"], ["Took", "n"], "Model", "Surface", "Backend"],
    rows,
    status.traces === "all" ? "No answers yet." : "No answer had to be mended yet.",
  );
}
