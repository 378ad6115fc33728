// Token view of a recording, a file, text or token ids, with the gateway's interpretation.

import { json, reason } from "/page/api.js";
import { complaint, counted, day, el, field, number, say, seconds, shown, svg, table, tell, visible } from "/page/dom.js";
import { Tokens } from "/page/tokens.js";

const SAMPLE =
  "<|start|>user<|message|>What is the weather in Oslo?<|end|><|start|>assistant<|channel|>analysis<|message|>" +
  "I have to look.<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{\"location\": \"Oslo\"}<|call|>";
const LEAD =
  "gpt-oss writes Harmony: messages between special tokens, on channels (analysis for reasoning, final for the answer, commentary for tool calls). " +
  "This view shows every token. Where the output broke the format, the gateway repaired it. Each repair appears where it was decided, with its rule and the reason.";
const LEGEND = ["system", "developer", "user", "analysis", "commentary", "final", "call", "tool"];
const MOST_BYTES = 8_000_000;

export function inspector(main, id) {
  const text = el("textarea", { rows: 4, class: "mono", spellcheck: "false", autocapitalize: "off" });
  const file = el("input", { type: "file", accept: ".json,.txt,application/json,text/plain" });
  const name = el("input", { type: "text", spellcheck: "false", autocapitalize: "off", placeholder: "req_…", value: id });
  const whole = el("input", { type: "checkbox" });
  const readAs = el("span", { class: "hint", "aria-live": "polite" });
  const trouble = complaint();
  let gone = false;
  let asked = 0;
  const place = el("div", { class: "inspection" });
  const run = async (body, retries = 0) => {
    // Only the latest of several requests counts.
    asked += 1;
    const own = asked;
    const overtaken = () => gone || own !== asked;
    tell(trouble, "");
    place.setAttribute("aria-busy", "true");
    place.replaceChildren(el("p", { class: "empty late" }, "Loading …"));
    say("Loading");
    try {
      const told = await read(body, retries, overtaken);
      if (overtaken()) return;
      place.replaceChildren(...drawn(told));
      if (!body.id) shown(place);
      say(`Loaded. ${mended(told)}`);
    } catch (error) {
      if (overtaken()) return;
      tell(trouble, reason(error));
      place.replaceChildren();
    }
    place.removeAttribute("aria-busy");
  };
  const byId = el("form", { class: "inline" }, field("Recording", name), el("button", { type: "submit" }, "Open"));
  byId.addEventListener("submit", (event) => {
    event.preventDefault();
    const wanted = `#/inspector/${encodeURIComponent(name.value.trim())}`;
    if (location.hash === wanted) run({ id: name.value.trim() });
    else location.hash = wanted;
  });
  const pasted = el(
    "form",
    { class: "pasted" },
    field("Or paste a recording, Harmony text or token ids", text),
    el("div", { class: "row" },
      el("button", { type: "submit", class: "primary" }, "Inspect"),
      el("button", { type: "button", onclick: () => { text.value = SAMPLE; told(); pasted.requestSubmit(); } }, "Try an example"),
      el("label", { class: "check" }, whole, " All of it is model output"),
      readAs),
  );
  const told = () => { readAs.textContent = text.value.trim() ? `Read as ${kindOf(text.value).what}` : ""; };
  text.addEventListener("input", told);
  file.addEventListener("change", async () => {
    const [given] = file.files;
    if (!given) return;
    if (given.size > MOST_BYTES) {
      tell(trouble, "The file is larger than 8 MB.");
      return;
    }
    const content = await given.text();
    text.value = content.length > 20_000 ? "" : content;
    told();
    run(kindOf(content).body(whole.checked));
  });
  pasted.addEventListener("submit", (event) => {
    event.preventDefault();
    if (text.value.trim()) run(kindOf(text.value).body(whole.checked));
  });
  main.append(el("h1", {}, "Inspector"), el("p", { class: "muted lead" }, LEAD), el("div", { class: "sources" }, el("div", { class: "kept" }, byId, field("Or open a file from unisono trace ID --json", file)), pasted), trouble, place);
  if (id) run({ id }, 8);
  return () => { gone = true; };
}

// A recording is written after its answer, so it may not exist yet.
async function read(body, retries, overtaken) {
  for (let left = retries; ; left -= 1) {
    try {
      return await json("/v1/inspect", { body });
    } catch (error) {
      if (left <= 0 || error.status !== 404 || overtaken()) throw error;
      await new Promise((resolve) => setTimeout(resolve, 300));
    }
  }
}

// Converts pasted input into a request.
function kindOf(text) {
  const given = text.trim();
  if (given.startsWith("{")) {
    try {
      const trace = JSON.parse(given);
      if (trace.object === "unisono.trace") return { what: "a recording", body: () => ({ trace }) };
    } catch {
      // Text may begin with a brace too.
    }
  }
  const tokens = idsOf(given);
  if (tokens) {
    return { what: counted(tokens.length, "token id"), body: (all_output) => ({ tokens, all_output }) };
  }
  return { what: "Harmony text", body: (all_output) => ({ text: text.toWellFormed(), all_output }) };
}

// Single pass over the characters: pasted input may be long.
function idsOf(given) {
  if (!/^\[?[-\d\s,]+\]?$/.test(given)) return null;
  const words = given.replace(/^\[/, "").replace(/\]$/, "").split(/[\s,]+/).filter(Boolean);
  return words.length && words.every((word) => /^-?\d+$/.test(word)) ? words.map(Number) : null;
}

function drawn(told) {
  const views = [];
  const steps = told.steps.map((step) => stepOf(step, told.steps.length, views));
  const first = [told.about && heading(told.about), repairs(told, views), legend()];
  // For a recording the tokens contain more.
  const rest = told.about ? [...steps, items(told)] : [items(told), ...steps];
  return [...first, ...rest, tools(told), leftOut(told)].filter(Boolean);
}

function heading(about) {
  const ended = [about.outcome, about.error, about.finish].filter(Boolean).join(", ");
  const usage = about.usage;
  const facts = [
    ["Recorded", day(about.at)],
    ["Model", `${about.model} via ${about.surface}`],
    ["Outcome", ended],
    ["Duration", `${seconds(about.ended_s)}, first token after ${seconds(about.first_s)}`],
    ["Tokens", usage && `${number(usage.prompt_tokens)} in, ${number(usage.completion_tokens)} out, ${number(usage.reasoning_tokens)} of them reasoning`],
    ["Deployments", about.tries.map((one) => one.deployment + (one.failure ? ` (${one.failure})` : "")).join(", then ")],
    ["Waited", about.waits.map((one) => seconds(one.ended_s - one.began_s) + (one.failure ? ` (${one.failure})` : "")).join(", ")],
    ["Unmet requirement", about.unmet],
    ["Gateway", about.gateway],
  ].filter(([, value]) => value);
  return el(
    "section",
    { "aria-label": "The answer" },
    el("h2", { class: "mono" }, visible(about.id)),
    el("dl", { class: "facts-list" }, facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, visible(String(value)))))),
  );
}

function legend() {
  return el("ul", { class: "legend", "aria-label": "Colours" }, LEGEND.map((name) => el("li", { class: `of-${name}` }, name)));
}

function repairsOf(told) {
  return told.steps.flatMap((step, at) => step.output.filter((one) => one.kind === "repair").map((one, nth) => ({ one, at, nth })));
}

function mended(told) {
  const found = repairsOf(told).length;
  return found ? counted(found, "repair") : "No repairs: this is valid Harmony.";
}

function repairs(told, views) {
  const found = repairsOf(told);
  if (!found.length) return el("p", { class: "well" }, mended(told));
  const list = found.slice(0, 100).map(({ one, at, nth }) =>
    el("li", {}, el("button", { type: "button", class: "link", onclick: () => views[at].reveal(nth) }, el("code", { class: "rule" }, one.rule)), ` ${one.why}`,
      told.steps.length > 1 ? el("span", { class: "muted" }, ` Step ${told.steps[at].step}.`) : null));
  return el("section", { "aria-label": "Repairs" }, el("h2", {}, mended(told)), el("ol", { class: "repairs" }, list),
    found.length > 100 ? el("p", { class: "note" }, "Only the first 100 are listed here; the tokens below show all of them.") : null);
}

function items(told) {
  if (!told.items.length) return null;
  const title = told.about ? "Items sent to the client" : "Items that a client would receive";
  const rows = told.items.slice(0, 200).map((item) => [
    el("span", { class: `badge of-${item.kind === "hosted_call" ? "call" : item.kind}` }, item.kind.replace("_", " ")),
    el("span", {}, item.name ? el("code", {}, visible(item.name)) : null, item.complete ? null : el("span", { class: "bad" }, " incomplete")),
    // A recording contains the text as tokens, which are shown below.
    item.text === undefined
      ? el("span", { class: "muted" }, counted(item.characters, "character"))
      : el("span", { class: "item-text" }, item.text.slice(0, 2000), item.characters > 2000 ? ` … ${number(item.characters)} characters` : null),
  ]);
  return el("section", { "aria-label": title }, el("h2", {}, title), table("Items", ["Item", "Name", "Text"], rows, ""));
}

function stepOf(step, steps, views) {
  const view = new Tokens(step.output, `Output of step ${step.step}`);
  views.push(view);
  const prompts = step.prompts.map((prompt) => {
    const details = el("details", {}, el("summary", {}, prompt.behind
      ? `Prompt, after the ${number(prompt.behind)} tokens that it shares with the previous prompt`
      : "Prompt"));
    // Rendered when it is opened.
    details.addEventListener("toggle", () => {
      if (details.open && details.childElementCount === 1) details.append(new Tokens(prompt.segments, `Prompt of step ${step.step}`).node);
    });
    return details;
  });
  const title = steps > 1 ? `Step ${step.step}` : "Tokens";
  return el("section", { class: "step", "aria-label": title }, el("h2", {}, title, " ", el("span", { class: "muted" }, `${number(step.generated)} generated`)),
    generations(step), ...prompts, el("h3", {}, "Output"), step.output.length ? view.node : el("p", { class: "empty" }, "No tokens."));
}

function generations(step) {
  if (!step.generations.length) return null;
  const rows = step.generations.map((one) => {
    const first = one.first_token_s === null ? null : one.first_token_s - one.began_s;
    const pace = first === null || one.generated < 2 ? null : (one.ended_s - one.first_token_s) / (one.generated - 1);
    return [
      one.deployment,
      el("span", { class: one.failure ? "bad" : undefined }, one.failure || one.finish || "stopped by the gateway"),
      number(one.prompt_tokens) + (one.cached_tokens === null ? "" : ` (${number(one.cached_tokens)} cached)`),
      number(one.generated),
      seconds(first),
      pace === null ? "–" : seconds(pace),
      span(step.generations, one),
    ];
  });
  return table(`Generations of step ${step.step}`,
    ["Deployment", "Outcome", ["Prompt", "n"], ["Generated", "n"], ["First token", "n"], ["Per token", "n"], "Timeline"], rows, "");
}

// Time bar from start to end, with the part before the first token in a lighter colour.
function span(all, one) {
  const begin = Math.min(...all.map((other) => other.began_s));
  const scale = 160 / Math.max(...all.map((other) => other.ended_s - begin), 0.001);
  const x = (at) => (at - begin) * scale;
  const first = one.first_token_s ?? one.ended_s;
  const title = svg("title", {}, `from ${seconds(one.began_s)} to ${seconds(one.ended_s)}`);
  return svg("svg", { viewBox: "0 0 162 12", class: "span", role: "img", "aria-label": `from ${seconds(one.began_s)} to ${seconds(one.ended_s)}` }, title,
    svg("rect", { x: x(one.began_s), y: 3, width: Math.max(x(first) - x(one.began_s), 1), height: 6, class: "bar-wait" }),
    svg("rect", { x: x(first), y: 1, width: Math.max(x(one.ended_s) - x(first), 1), height: 10, class: "bar-some" }));
}

function tools(told) {
  if (!told.tools.length) return null;
  const rows = told.tools.map((one) => [visible(`${one.server}.${one.name}`), one.outcome, seconds(one.began_s), seconds(one.ended_s - one.began_s)]);
  return el("section", { "aria-label": "Server tools" }, el("h2", {}, "Server tools"),
    table("Server tool calls", ["Tool", "Outcome", ["Start", "n"], ["Duration", "n"]], rows, ""));
}

function leftOut(told) {
  return told.left_out.length ? el("p", { class: "note" }, `Omitted because the recording was too large: ${told.left_out.join(", ")}.`) : null;
}
