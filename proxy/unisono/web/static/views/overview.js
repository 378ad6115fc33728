// Overview: plots of the traffic, models with their health, recent errors in words.

import { json, query, reason } from "/page/lib/api.js";
import { complaint, el, empty, fact, loading, section, segmented, tell } from "/page/lib/dom.js";
import { day, dollars, number, percent, seconds, short } from "/page/lib/format.js";
import { Plot } from "/page/lib/plots.js";
import { renew } from "/page/lib/renew.js";
import { seesAll, state, watch } from "/page/lib/store.js";
import { deploymentTable, groupsOf, plainModels, sum } from "/page/views/deployments.js";
import { causes, inWords } from "/page/lib/words.js";

const RANGES = { "1h": { text: "1 h", s: 3600, step: 60 }, "24h": { text: "24 h", s: 86_400, step: 300 }, "30d": { text: "30 d", s: 30 * 86_400, step: 21_600 } };
const EVERY_MS = 5000;
const SLOW_MS = 30_000;
const ERRORS = 6;
let range = "1h";

export function overview(main) {
  const trouble = complaint();
  const tiles = el("div", { class: "sums", hidden: true });
  const models = el("div", {}, loading());
  const errors = el("div", {}, loading());
  const plots = makePlots();
  let gone = false;
  let timer = 0;
  let last = null;
  const pause = el("button", { type: "button", class: "small", "aria-pressed": "false", onclick: () => {
    state.paused = !state.paused;
    pause.setAttribute("aria-pressed", String(state.paused));
    pause.textContent = state.paused ? "Paused" : "Pause";
  } }, "Pause");
  const ranges = segmented("Range", Object.entries(RANGES).map(([value, { text }]) => [value, text]), range, (chosen) => { range = chosen; look(); });
  main.append(
    el("div", { class: "heading" }, el("h1", {}, "Overview"), el("div", { class: "row" }, ranges, pause)),
    trouble, tiles,
    el("div", { class: "plots" }, Object.values(plots).map((plot) => plot.node)),
    section("models", "Models", models),
    section("errors", "Recent errors", errors),
  );
  const unwatch = watch(({ status, trouble: failed }) => {
    if (failed && !status) {
      if (failed.status) tell(trouble, reason(failed));
      return;
    }
    const age = failed ? `${reason(failed)} The data below is from ${day(status.at)}.` : "";
    // Unchanged text is not written again, because screen readers would read out the alert again.
    if (trouble.textContent !== age) tell(trouble, age);
    renew(models, modelsOf(status));
    if (last) drawTiles(tiles, last, status);
    if (!last) look();
  });

  async function look() {
    clearTimeout(timer);
    const own = range;
    try {
      if ((state.status && !document.hidden && !state.paused) || (state.status && own !== last?.range)) {
        const { s } = RANGES[own];
        const until = Math.ceil(Date.now() / 1000);
        const [stats, failed] = await Promise.all([
          json(`/v1/requests/stats${query({ since: until - s, until })}`, { quiet: true }),
          json(`/v1/requests${query({ failed: true, limit: ERRORS })}`, { quiet: true }),
        ]);
        if (gone || own !== range) return;
        last = { range: own, stats: binned(stats, until), failed: failed.data, total: stats.data };
        drawTiles(tiles, last, state.status);
        drawPlots(plots, last.stats);
        renew(errors, errorsOf(last.failed));
      }
    } catch (error) {
      if (!gone && error.status) renew(errors, el("p", { class: "note" }, reason(error)));
    }
    if (!gone) timer = setTimeout(look, range === "1h" ? EVERY_MS : SLOW_MS);
  }
  return () => {
    gone = true;
    clearTimeout(timer);
    unwatch();
    for (const plot of Object.values(plots)) plot.close();
  };
}

// -- the plots

function makePlots() {
  const times = [["p50", "final"], ["p95", "tool"], ["p99", "call"]].map(([name, colour]) => ({ name, colour }));
  const to = (path, text) => el("a", { href: `#/requests${path}` }, text);
  return {
    requests: new Plot("Requests", [{ name: "all", colour: "tool", bars: true }, { name: "errors", colour: "bad", bars: true }], { format: short, link: to("", "List") }),
    first: new Plot("Time to first token", times, { format: seconds }),
    duration: new Plot("Duration", times, { format: seconds }),
    tokens: new Plot("Tokens per second", [{ name: "output", colour: "final" }, { name: "input", colour: "tool" }], { format: short }),
    spend: new Plot("Spend", [{ name: "per interval", colour: "developer", bars: true }], { format: dollars }),
    recoveries: new Plot("Answers with recoveries", [{ name: "answers", colour: "repair", bars: true }], { format: short, link: to("?recovery=any", "List") }),
    load: new Plot("Load", [{ name: "in flight", colour: "tool" }, { name: "queue", colour: "bad" }], { format: short, note: "average, of ended requests" }),
  };
}

const SUMS = ["requests", "errors", "recovered", "input_tokens", "output_tokens", "cost", "total_duration_s", "total_waited_s"];

// Returns intervals of equal length for the whole range. Counts of several stored intervals are summed. Percentiles
// cannot be summed, so the highest is used.
function binned(stats, until) {
  const { s, step } = RANGES[range];
  const width = Math.max(step, stats.step_s);
  const first = Math.floor((until - s) / width) * width;
  const bins = [];
  for (let at = first; at <= until; at += width) bins.push({ at, ...Object.fromEntries(SUMS.map((name) => [name, 0])), duration_s: null, first_token_s: null });
  for (const point of stats.data) {
    const bin = bins[Math.floor((point.at - first) / width)];
    if (!bin) continue;
    for (const name of SUMS) bin[name] += point[name];
    for (const name of ["duration_s", "first_token_s"]) bin[name] = highest(bin[name], point[name]);
  }
  return { width, bins, until };
}

function highest(one, other) {
  if (!one) return other;
  return Object.fromEntries(Object.keys(one).map((name) => [name, one[name] === null ? other[name] : Math.max(one[name], other[name] ?? 0)]));
}

function drawPlots(plots, { width, bins, until }) {
  const times = bins.map(({ at }) => at);
  const of = (pick) => bins.map(pick);
  // The last interval has not ended, and its first seconds would give exaggerated rates.
  const lasted = ({ at }) => Math.min(width, until - at);
  const perSecond = (name) => of((bin) => (lasted(bin) < width / 4 ? null : bin[name] / lasted(bin)));
  const shares = (name) => ["p50", "p95", "p99"].map((share) => of((bin) => bin[name]?.[share] ?? null));
  plots.requests.draw([times, of((bin) => bin.requests), of((bin) => bin.errors)]);
  plots.first.draw([times, ...shares("first_token_s")]);
  plots.duration.draw([times, ...shares("duration_s")]);
  plots.tokens.draw([times, perSecond("output_tokens"), perSecond("input_tokens")]);
  plots.spend.draw([times, of((bin) => bin.cost)]);
  plots.recoveries.draw([times, of((bin) => bin.recovered)]);
  const [lasting, waiting] = [perSecond("total_duration_s"), perSecond("total_waited_s")];
  plots.load.draw([times, lasting.map((value, at) => (value === null ? null : value - waiting[at])), waiting]);
}

// -- tiles, models, errors

function drawTiles(tiles, { stats, range: shown }, status) {
  const total = Object.fromEntries(SUMS.map((name) => [name, sum(stats.bins.map((bin) => bin[name]))]));
  const latest = stats.bins.findLast((bin) => bin.first_token_s?.p95);
  const groups = groupsOf(status);
  const ready = groups.filter((model) => model.ready).length;
  const members = groups.flatMap((model) => model.deployments ?? []);
  const fit = members.filter((one) => one.state === "ready").length;
  const per = RANGES[shown].text;
  tiles.hidden = false;
  renew(tiles,
    fact("Models ready", `${number(ready)} of ${number(groups.length)}`, members.length ? `${number(fit)} of ${number(members.length)} deployments` : `version ${status.version}`, ready < groups.length ? "bad" : undefined),
    fact(`Requests, ${per}`, short(total.requests), `${short(total.recovered)} with recoveries`),
    fact(`Errors, ${per}`, percent(total.errors, total.requests), number(total.errors), total.errors ? "bad" : undefined),
    fact("First token, p95", seconds(latest?.first_token_s.p95), latest ? `at ${day(latest.at).slice(0, -3)}` : "no answers"),
    fact(`Tokens out, ${per}`, short(total.output_tokens), `${short(total.input_tokens)} in`),
    members.length ? fact("In flight", number(sum(members.map((one) => one.running))), `${number(sum(groups.map((model) => model.waiting)))} in the queue`) : null,
    fact(`Spend, ${per}`, dollars(total.cost), seesAll() ? "all keys" : "this key"));
}

function modelsOf(status) {
  const filter = { text: "", unwell: false };
  const parts = [status.minutes ? deploymentTable(status, filter) : plainModels(status, filter)];
  if (status.minutes) parts.push(el("p", {}, el("a", { href: "#/models" }, "All models and their settings")));
  return el("div", {}, parts);
}

function errorsOf(failed) {
  if (!failed.length) return empty("No failed requests are stored.");
  const items = failed.map((one) => {
    const why = causes(one, state.status);
    return el("li", { "data-key": one.id },
      el("a", { href: `#/requests/${encodeURIComponent(one.id)}` }, el("time", {}, day(one.at))), " ",
      el("span", { class: "bad" }, String(one.status || "failed")), " ", inWords(one), " ",
      el("span", { class: "muted" }, [one.model && `Model ${one.model}.`, (one.key_name || one.key) && `Key ${one.key_name || one.key}.`].filter(Boolean).join(" ")),
      why.length ? el("p", { class: "cause" }, why.join("; ")) : null);
  });
  return el("div", {}, el("ul", { class: "errors" }, items), el("p", {}, el("a", { href: "#/requests?failed=true" }, "All failed requests")));
}
