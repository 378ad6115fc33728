// Usage and spend of a period: by day, model, key and team.

import { json, query, reason } from "/page/lib/api.js";
import { complaint, el, fact, field, loading, section, table, tell } from "/page/lib/dom.js";
import { counted, dollars, number } from "/page/lib/format.js";
import { Plot } from "/page/lib/plots.js";
import { seesAll } from "/page/lib/store.js";

const DAY_MS = 86_400_000;
const iso = (ms) => new Date(ms).toISOString().slice(0, 10);

export function spend(place) {
  const since = el("input", { type: "date", value: iso(Date.now() - 29 * DAY_MS), required: true });
  const until = el("input", { type: "date", value: iso(Date.now()), required: true });
  const trouble = complaint();
  const tiles = el("div", { class: "sums", hidden: true });
  const tokens = new Plot("Tokens by day", [{ name: "input", colour: "tool", bars: true }, { name: "output", colour: "final", bars: true }], { format: number, note: "days are UTC" });
  const cost = new Plot("Spend by day", [{ name: "spend", colour: "developer", bars: true }], { format: dollars, note: "days are UTC" });
  const tables = el("div", {}, loading());
  const form = el("form", { class: "inline" }, field("From (UTC)", since), field("To", until), el("button", { type: "submit" }, "Show"));
  let gone = false;
  place.replaceChildren(form, trouble, tiles, el("div", { class: "plots" }, tokens.node, cost.node), tables);
  async function reload() {
    try {
      const range = { start_date: since.value, end_date: until.value };
      const [activity, teams] = await Promise.all([
        json(`/user/daily/activity${query({ ...range, page_size: 1000 })}`),
        seesAll() ? json(`/global/spend/report${query(range)}`, { quiet: true }).catch(() => []) : [],
      ]);
      if (gone) return;
      tell(trouble, "");
      draw(activity, teams);
    } catch (error) {
      if (gone) return;
      tell(trouble, reason(error));
      tables.replaceChildren();
    }
  }

  function draw({ results, metadata }, teams) {
    const of = (name) => metadata[`total_${name}`] ?? 0;
    tiles.hidden = false;
    tiles.replaceChildren(
      fact("Requests", number(of("api_requests")), counted(of("failed_requests"), "error")),
      fact("Input tokens", number(of("prompt_tokens")), `${number(of("cache_read_input_tokens"))} cached`),
      fact("Output tokens", number(of("completion_tokens")), ""),
      fact("Spend", dollars(of("spend")), seesAll() ? "all keys" : "all keys that you may read"));
    const days = new Map(results.map((one) => [one.date, one.metrics]));
    const dates = [];
    for (let at = Date.parse(since.value); at <= Date.parse(until.value) && dates.length < 400; at += DAY_MS) dates.push(iso(at));
    const values = (name) => dates.map((date) => days.get(date)?.[name] ?? 0);
    const times = dates.map((date) => new Date(`${date}T00:00:00`).getTime() / 1000);
    tokens.draw([times, values("prompt_tokens"), values("completion_tokens")]);
    cost.draw([times, values("spend")]);
    tables.replaceChildren(
      section("by-model", "By model", sums(results, "models", "Model", (name) => name)),
      section("by-key", "By key", sums(results, "api_keys", "Key", (name, about) => about?.key_alias ? `${about.key_alias} ${name}` : name.replace("master_key", "master key"))),
      ...(teams.length ? [section("by-team", "By team", byTeam(teams))] : []));
  }
  reload();
  form.addEventListener("submit", (event) => { event.preventDefault(); reload(); });
  return () => { gone = true; tokens.close(); cost.close(); };
}

const NAMES = ["api_requests", "failed_requests", "prompt_tokens", "completion_tokens", "spend"];

function sums(results, group, head, words) {
  const found = new Map();
  for (const day of results) {
    for (const [name, { metrics, metadata }] of Object.entries(day.breakdown[group])) {
      const sum = found.get(name) ?? { about: metadata, ...Object.fromEntries(NAMES.map((one) => [one, 0])) };
      for (const one of NAMES) sum[one] += metrics[one];
      found.set(name, sum);
    }
  }
  const rows = [...found].sort(([, one], [, other]) => other.spend - one.spend || other.api_requests - one.api_requests)
    .map(([name, sum]) => [words(name, sum.about), number(sum.api_requests), number(sum.failed_requests), number(sum.prompt_tokens), number(sum.completion_tokens), dollars(sum.spend)]);
  return table(`Usage by ${head.toLowerCase()}`, [head, ["Requests", "n"], ["Errors", "n"], ["Input", "n"], ["Output", "n"], ["Spend", "n"]], rows, "No usage in this period.");
}

function byTeam(report) {
  const found = new Map();
  for (const { teams } of report) for (const team of teams) found.set(team.team_name, (found.get(team.team_name) ?? 0) + team.total_spend);
  const rows = [...found].sort(([, one], [, other]) => other - one).map(([name, sum]) => [name, dollars(sum)]);
  return table("Spend by team", ["Team", ["Spend", "n"]], rows, "No usage in this period.");
}
