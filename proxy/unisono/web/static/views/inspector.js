// Token view of a recording, a file, text or token ids, with the gateway's interpretation.

import { json, reason } from "/page/lib/api.js";
import { complaint, copier, el, facts, field, say, shown, svg, table, tell } from "/page/lib/dom.js";
import { visible } from "/page/lib/invisible.js";
import { counted, day, number, seconds } from "/page/lib/format.js";
import { state } from "/page/lib/store.js";
import { Tokens } from "/page/lib/tokens.js";
import { bodiesOf } from "/page/lib/messages.js";
import { forkOf } from "/page/views/fork.js";

const EXAMPLE_ID = "example";
const LISTED = 200;
const SAMPLE =
  "<|start|>user<|message|>What is the weather in Oslo?<|end|><|start|>assistant<|channel|>analysis<|message|>" +
  "I have to look.<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{\"location\": \"Oslo\"}<|call|>";
const EXAMPLE = { text: SAMPLE };
const LEAD =
  "gpt-oss writes Harmony: messages between special tokens, on channels (analysis for reasoning, final for the answer, commentary for tool calls). " +
  "This view shows every token. Where the output broke the format, the gateway corrected it. Each recovery appears where it was decided, with its rule and the reason.";
const LEGEND = ["system", "developer", "user", "analysis", "commentary", "final", "call", "tool"];
const MOST_BYTES = 8_000_000;

export function inspector(main, id) {
  const text = el("textarea", { rows: 4, class: "mono", spellcheck: "false", autocapitalize: "off" });
  const file = el("input", { type: "file", accept: ".json,.txt,application/json,text/plain" });
  const whole = el("input", { type: "checkbox" });
  const readAs = el("span", { class: "hint", "aria-live": "polite" });
  const trouble = complaint();
  const place = el("div", { class: "inspection" });
  const turning = el("div", { class: "row turning" });
  let gone = false;
  let asked = 0;
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
      // The list may have been loaded before the recording was written.
      if (body.id && list.all.every((one) => one.id !== body.id)) list.load();
      if (!body.id && !body.isFirst) shown(place);
      say(`Loaded. ${mended(told)}`);
    } catch (error) {
      if (overtaken()) return;
      tell(trouble, reason(error));
      place.replaceChildren();
    }
    place.removeAttribute("aria-busy");
  };
  const told = () => { readAs.textContent = text.value.trim() ? `Read as ${kindOf(text.value).what}` : ""; };
  const pasted = el("form", { class: "pasted" }, field("Or paste a recording, Harmony text or token ids", text),
    el("div", { class: "row" }, el("button", { type: "submit", class: "primary" }, "Inspect"), el("label", { class: "check" }, whole, " All of this is model output"), readAs));
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
  const list = new Recordings(id, {
    turned: (newer, older) => turning.replaceChildren(...turns(id, newer, older)),
    // Without an id, the newest recording is opened, or the example if there is none.
    listed: (newest) => { if (!id && !asked) run(newest ? { id: newest, isFirst: true } : { ...EXAMPLE, isFirst: true }); },
  });
  main.append(
    el("div", { class: "heading" }, el("h1", {}, "Inspector"), turning),
    el("details", { class: "lead" }, el("summary", {}, "What this shows"), el("p", { class: "muted" }, LEAD)),
    el("div", { class: "inspecting" },
      el("div", { class: "stack sources" }, list.node, el("details", { class: "panel" }, el("summary", {}, "Inspect something else"), field("Open a file from unisono trace ID --json", file), pasted)),
      el("div", {}, trouble, place)));
  if (id === EXAMPLE_ID) run({ ...EXAMPLE, isFirst: true });
  else if (id) run({ id }, 8);
  list.load();
  const onKey = (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest?.("input, textarea, select, dialog")) return;
    if (event.key === "j") list.go(1);
    else if (event.key === "k") list.go(-1);
  };
  addEventListener("keydown", onKey);
  return () => {
    gone = true;
    list.gone = true;
    removeEventListener("keydown", onKey);
  };
}

const to = (id) => `#/inspector/${encodeURIComponent(id)}`;

function turns(id, newer, older) {
  return [
    newer ? el("a", { class: "button small", href: to(newer) }, "Newer") : null,
    older ? el("a", { class: "button small", href: to(older) }, "Older") : null,
    id ? copier("link", () => `${location.origin}/${to(id)}`) : null,
    id && id !== EXAMPLE_ID ? el("a", { class: "button small", href: `#/requests/${encodeURIComponent(id)}` }, "Request") : null,
  ].filter(Boolean);
}

// The latest recordings, with a search over their ids, models, outcomes and rules.
class Recordings {
  constructor(id, { turned, listed }) {
    this.id = id;
    this.turned = turned;
    this.listed = listed;
    this.all = [];
    this.search = el("input", { type: "search", spellcheck: "false", autocapitalize: "off", autocomplete: "off", placeholder: "Id, model, rule or outcome" });
    this.list = el("ul", { class: "recordings" });
    this.note = el("p", { class: "note" });
    this.search.addEventListener("input", () => this.draw());
    const form = el("form", { role: "search" }, field("Recording", this.search));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      // A complete id is opened even if it is not in the list.
      const wanted = this.search.value.trim();
      if (wanted) location.hash = to(this.found[0]?.id ?? wanted);
    });
    this.node = el("section", { class: "panel", "aria-label": "Recordings" }, form, this.list, this.note);
  }

  get found() {
    const words = this.search.value.toLowerCase().split(/\s+/).filter(Boolean);
    return this.all.filter((one) => {
      const text = `${one.id} ${one.model} ${one.error || one.finish || one.outcome} ${one.surface} ${one.backend} ${one.recoveries.join(" ")}`.toLowerCase();
      return words.every((word) => text.includes(word));
    });
  }

  async load() {
    try {
      this.all = (await json(`/v1/traces?limit=${LISTED}`)).data;
    } catch (error) {
      this.note.textContent = reason(error);
    }
    if (this.gone) return;
    this.draw();
    this.listed(this.all[0]?.id);
    const at = this.all.findIndex(({ id }) => id === this.id);
    if (at >= 0) this.turned(this.all[at - 1]?.id, this.all[at + 1]?.id);
    else this.turned(null, null);
  }

  draw() {
    const example = el("li", {}, el("a", { href: to(EXAMPLE_ID), "aria-current": this.id === EXAMPLE_ID ? "true" : null }, el("strong", {}, "Example"), el("span", { class: "muted" }, "a tool call with a recovery")));
    this.list.replaceChildren(example, ...this.found.map((one) => el("li", {},
      el("a", { href: to(one.id), "aria-current": one.id === this.id ? "true" : null },
        el("span", {}, el("time", {}, day(one.at)), " ", el("span", { class: one.error ? "bad" : "muted" }, one.error || one.finish || one.outcome)),
        el("span", { class: "muted" }, `${one.model} · ${counted(one.generated, "token")}`),
        one.recoveries.length ? el("span", { class: "chips" }, one.recoveries.slice(0, 3).map((rule) => el("code", { class: "rule" }, rule))) : null))));
    const off = state.status?.traces === "off";
    this.note.textContent = !this.all.length ? (off ? "Recording is off. unisono.traces.mode turns it on." : "No answers recorded yet.") : this.found.length ? `${number(this.found.length)} of ${number(this.all.length)}, newest first` : "No recording matches. Press Enter to open the recording with this id.";
  }

  go(step) {
    const at = this.all.findIndex(({ id }) => id === this.id);
    const next = this.all[at < 0 ? 0 : at + step];
    if (next) location.hash = to(next.id);
  }
}

// A recording is written after its answer, so it may not exist yet.
async function read(body, retries, overtaken) {
  for (let left = retries; ; left -= 1) {
    try {
      const { isFirst, ...asked } = body;
      return await json("/v1/inspect", { body: asked, reads: true });
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
  const first = [told.about && heading(told.about, told.steps), repairs(told, views), legend()];
  // For a recording, the tokens come first, because they contain more than the items.
  const rest = told.about ? [...steps, items(told)] : [items(told), ...steps];
  return [...first, ...rest, tools(told), leftOut(told)].filter(Boolean);
}

function heading(about, steps) {
  const ended = [about.outcome, about.error, about.finish].filter(Boolean).join(", ");
  const usage = about.usage;
  const list = facts([
    ["Recorded", day(about.at)],
    ["Model", `${about.model} via ${about.surface}`],
    ["Outcome", ended],
    ["Duration", `${seconds(about.ended_s)}, first token after ${seconds(about.first_s)}`],
    ["Tokens", usage && `${number(usage.prompt_tokens)} in, ${number(usage.completion_tokens)} out, ${number(usage.reasoning_tokens)} of them reasoning`],
    ["Deployments", about.tries.map((one) => one.deployment + (one.failure ? ` (${one.failure})` : "")).join(", then ")],
    ["Waited", about.waits.map((one) => seconds(one.ended_s - one.began_s) + (one.failure ? ` (${one.failure})` : "")).join(", ")],
    ["Unmet requirement", about.unmet],
    ["Gateway", about.gateway],
  ]);
  return el(
    "section",
    { "aria-label": "The answer" },
    el("h2", { class: "mono" }, visible(about.id)),
    list,
    forkOf(about, steps),
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
  return found ? `${number(found)} ${found === 1 ? "recovery" : "recoveries"}` : "No recoveries: this is valid Harmony.";
}

function repairs(told, views) {
  const found = repairsOf(told);
  if (!found.length) return el("p", { class: "well" }, mended(told));
  const list = found.slice(0, 100).map(({ one, at, nth }) =>
    el("li", {}, el("button", { type: "button", class: "link", onclick: () => views[at].reveal(nth) }, el("code", { class: "rule" }, one.rule)), ` ${one.why}`,
      told.steps.length > 1 ? el("span", { class: "muted" }, ` Step ${told.steps[at].step}.`) : null));
  return el("section", { "aria-label": "Recoveries" }, el("h2", {}, mended(told)), el("ol", { class: "repairs" }, list),
    found.length > 100 ? el("p", { class: "note" }, "Only the first 100 are listed here; the tokens below show all of them.") : null);
}

function items(told) {
  if (!told.items.length) return null;
  const title = told.about ? "Items sent to the client" : "Items that a client would receive";
  // A recording contains the text of an item as tokens only.
  const bodies = told.about ? bodiesOf(told.steps.flatMap((step) => step.output)) : [];
  const rows = told.items.slice(0, 200).map((item) => withText(item, bodies)).map((item) => [
    el("span", { class: `badge of-${item.kind === "hosted_call" ? "call" : item.kind}` }, item.kind.replace("_", " ")),
    el("span", {}, item.name ? el("code", {}, visible(item.name)) : null, item.complete ? null : el("span", { class: "bad" }, " incomplete")),
    item.text === undefined
      ? el("span", { class: "muted" }, counted(item.characters, "character"))
      : el("span", { class: "item-text" }, item.text.slice(0, 2000), item.characters > 2000 ? ` … ${number(item.characters)} characters` : null),
  ]);
  return el("section", { "aria-label": title }, el("h2", {}, title), table("Items", ["Item", "Name", "Text"], rows, ""));
}

// Adds the text of an item: that of the first message with the same length in code points.
function withText(item, bodies) {
  if (item.text !== undefined) return item;
  const at = bodies.findIndex((body) => [...body].length === item.characters);
  return at < 0 ? item : { ...item, text: bodies.splice(at, 1)[0] };
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
