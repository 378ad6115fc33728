// Usage of the caller's key, as a chart by day and a table.

import { json, reason } from "/page/api.js";
import { complaint, counted, el, field, number, svg, table, tell } from "/page/dom.js";

const DAY_MS = 86400000;
const HIGH = 150;

export function usage(main) {
  const iso = (ms) => new Date(ms).toISOString().slice(0, 10);
  const since = el("input", { type: "date", value: iso(Date.now() - 29 * DAY_MS), required: true });
  const until = el("input", { type: "date", value: iso(Date.now()), required: true });
  const shown = el("div", {}, el("p", { class: "empty" }, "Loading …"));
  shown.firstChild.classList.add("late");
  const trouble = complaint();
  const form = el(
    "form",
    { class: "inline" },
    field("From (UTC)", since),
    field("To", until),
    el("button", { type: "submit" }, "Show"),
  );
  main.append(el("h1", {}, "Usage of this key"), form, trouble, shown);
  async function show() {
    try {
      const query = new URLSearchParams({ since: since.value, until: until.value });
      const told = await json(`/v1/usage?${query}`);
      tell(trouble, "");
      shown.replaceChildren(...drawn(told, Math.max(280, shown.clientWidth - 34)));
    } catch (error) {
      tell(trouble, reason(error));
      shown.replaceChildren();
    }
  }
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    show();
  });
  show();
}

// Small amounts: two significant digits.
const cost = (value) => (value ? `$${value.toFixed(value < 1 ? Math.max(2, 1 - Math.floor(Math.log10(value))) : 2)}` : "–");

function drawn(told, wide) {
  const fact = (name, value, more) =>
    el("div", { class: "sum" }, el("span", { class: "name" }, name), el("strong", {}, value), el("span", { class: "muted" }, more));
  const total = told.total;
  const rows = [...told.data]
    .reverse()
    .map((one) => [
      one.date, one.model, number(one.requests), number(one.errors), number(one.input_tokens),
      number(one.input_cached_tokens), number(one.output_tokens), number(one.reasoning_tokens), cost(one.cost_usd),
    ]);
  const heads = ["Requests", "Errors", "Input", "Cached input", "Output", "Reasoning output", "Cost"].map((name) => [name, "n"]);
  return [
    el(
      "div",
      { class: "sums" },
      fact("Requests", number(total.requests), counted(total.errors, "error")),
      fact("Input tokens", number(total.input_tokens), `${number(total.input_cached_tokens)} cached`),
      fact("Output tokens", number(total.output_tokens), `${number(total.reasoning_tokens)} reasoning`),
      fact("Cost", cost(total.cost_usd), told.key ? `key ${told.key}` : "master key"),
    ),
    chart(told, wide),
    table("Usage by day and model", ["Day", "Model", ...heads], rows, "No usage in this period."),
  ];
}

function chart(told, wide) {
  const days = new Map();
  const last = Date.parse(told.until);
  for (let at = Date.parse(told.since); at <= last && days.size < 400; at += DAY_MS) {
    days.set(new Date(at).toISOString().slice(0, 10), { input: 0, output: 0 });
  }
  for (const one of told.data) {
    const of = days.get(one.date);
    if (!of) continue;
    of.input += one.input_tokens;
    of.output += one.output_tokens;
  }
  const most = Math.max(1, ...[...days.values()].map((one) => one.input + one.output));
  const step = (wide - 4) / Math.max(days.size, 1);
  const width = Math.max(1, Math.min(step * 0.7, 28));
  const bars = [...days].flatMap(([date, one], at) => {
    const x = 2 + at * step + (step - width) / 2;
    const input = (HIGH - 26) * (one.input / most);
    const output = (HIGH - 26) * (one.output / most);
    const title = svg("title", {}, `${date}: ${number(one.input)} in, ${number(one.output)} out`);
    return [
      svg(
        "g", {}, title,
        svg("rect", { class: "bar-input", x, y: HIGH - 18 - input, width, height: input }),
        svg("rect", { class: "bar-output", x, y: HIGH - 18 - input - output, width, height: output }),
      ),
    ];
  });
  const every = Math.max(1, Math.ceil((days.size * 70) / wide));
  const marks = [...days.keys()].map((date, at) =>
    at % every ? null : svg("text", { x: at ? 2 + (at + 0.5) * step : 0, y: HIGH - 4, "text-anchor": at ? "middle" : "start" }, date.slice(5)),
  );
  return el(
    "figure",
    { class: "chart" },
    el(
      "figcaption",
      {},
      "Tokens by day, ",
      el("span", { class: "key-input" }, "input"),
      " and ",
      el("span", { class: "key-output" }, "output"),
      `; at most ${number(most)} per day`,
    ),
    svg(
      "svg",
      { viewBox: `0 0 ${wide} ${HIGH}`, role: "img", "aria-label": "Tokens by day; the table below lists the numbers" },
      svg("line", { x1: 0, x2: wide, y1: HIGH - 17.5, y2: HIGH - 17.5, class: "axis" }),
      bars,
      marks,
    ),
  );
}
