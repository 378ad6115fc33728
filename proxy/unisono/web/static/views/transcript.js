// Growing answer: separate parts for reasoning, calls and text, details of the generation below, tokens beside them.

import { copier, el } from "/page/lib/dom.js";
import { visible } from "/page/lib/invisible.js";
import { number, seconds } from "/page/lib/format.js";
import { MarkdownBody } from "/page/lib/markdown.js";
import { recorded, state } from "/page/lib/store.js";

const MOST_SHOWN = 100_000;
// Maximum characters that one frame renders. A busy machine draws few frames, and much text arrives between them.
const MOST_IN_FRAME = 3000;
// Text that ends in a joiner or in half of a surrogate pair, which the next chunk may complete.
const OPEN_END = /[\u200c\u200d\ud800-\udbff]$/;
// Maximum length of the text before a joiner that determines how the joiner is rendered: an emoji with its modifier.
const LONGEST_BEFORE = 8;

// Growing text. It is rendered at most once per frame, up to a size that the page can handle.
class Part {
  constructor(kind, title) {
    this.kind = kind;
    this.heading = title;
    this.pieces = [];
    this.length = 0;
    this.shown = 0;
    this.waiting = "";
    this.before = "";
    this.frame = 0;
    this.title = el("span", { class: "part-title" }, title);
    this.body = el("div", { class: kind === "final" ? "part-body md" : "part-body" });
    this.markdown = kind === "final" ? new MarkdownBody(this.body) : null;
    this.note = el("p", { class: "note", hidden: true });
    const head = el("div", { class: "part-head" }, this.title, copier(title.toLowerCase(), () => this.text));
    this.node = el("div", { class: `part of-${kind}`, role: "group", "aria-label": title }, head, this.body, this.note);
  }

  get text() {
    return this.pieces.join("");
  }

  named(name, id) {
    this.name = name;
    this.id = id;
    this.titled(this.heading, name);
  }

  titled(what, name) {
    this.what = [what, name];
    this.title.replaceChildren(`${what} `, el("code", {}, name.slice(0, 200)));
  }

  add(text) {
    this.pieces.push(text);
    this.length += text.length;
    this.waiting += text;
    this.frame ||= requestAnimationFrame(() => this.draw(false));
  }

  set(text) {
    const has = this.text;
    if (text === has) return;
    if (text.startsWith(has)) {
      this.add(text.slice(has.length));
      return;
    }
    this.pieces = [];
    this.waiting = this.before = "";
    this.length = this.shown = 0;
    this.body.replaceChildren();
    if (this.markdown) this.markdown = new MarkdownBody(this.body);
    this.add(text);
  }

  // The end of a chunk can only be rendered once the next chunk is there, or the text is `complete`.
  draw(complete) {
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    const most = complete ? this.waiting.length : Math.min(this.waiting.length, MOST_IN_FRAME);
    const upto = most - (!complete && OPEN_END.test(this.waiting.slice(0, most)) ? 1 : 0);
    const text = this.waiting.slice(0, Math.min(upto, MOST_SHOWN - this.shown));
    this.waiting = this.waiting.slice(upto);
    if (!complete && this.waiting.length > 1) this.frame = requestAnimationFrame(() => this.draw(false));
    this.shown += text.length;
    if (this.markdown) this.markdown.add(text, complete);
    else if (text) this.body.append(visible(text, this.before));
    this.before = (this.before + text).slice(-LONGEST_BEFORE);
    if (this.length > this.shown + this.waiting.length) {
      this.note.textContent = `Only the first ${number(this.shown)} of ${number(this.length)} characters are shown.`;
      this.note.hidden = false;
    }
  }

  get saved() {
    const { kind, heading, name, id, what, approval, choice } = this;
    return { kind, heading, name, id, what, approval, choice, text: this.text };
  }
}

export class Transcript {
  constructor(title) {
    this.parts = new Map();
    this.known = {};
    this.items = null;
    this.blocks = null;
    this.first = null;
    this.begin();
    // Not a live region: a stream of tokens would flood screen readers. Only the end is announced.
    this.body = el("div", { class: "parts", "aria-busy": "true" });
    this.next = el("div", { class: "row next" });
    this.foot = el("div", { class: "foot" });
    this.side = el("div", { class: "side", hidden: true });
    this.node = el("article", { class: "answer", "aria-label": "Answer" },
      el("div", { class: "answer-main" }, el("p", { class: "from" }, visible(title)), this.body, this.foot), this.side);
  }

  // Starts the clock. A request is sent again after the user has entered a new key.
  begin() {
    this.began = performance.now();
  }

  part(key, kind, title) {
    this.first ??= performance.now();
    let part = this.parts.get(key);
    if (!part) {
      part = new Part(kind, title);
      this.parts.set(key, part);
      this.body.append(part.node);
    }
    return part;
  }

  about(more) {
    Object.assign(this.known, more);
  }

  // Parts of the first choice, which the next request includes.
  get turn() {
    const of = (kind) => [...this.parts.values()].filter((part) => part.kind === kind && !part.choice);
    const blocks = this.blocks?.map(({ json, ...block }) => (json === undefined ? block : { ...block, input: parsedOr(json) }));
    return {
      kind: "assistant",
      text: [...of("final"), ...of("raw")].map((part) => part.text).join(""),
      calls: of("call").map((part) => ({ id: part.id, name: part.name, text: part.text })),
      approvals: of("approval").map((part) => ({ id: part.approval, name: part.what?.[1] })),
      ...(this.items ? { items: this.items } : {}),
      ...(blocks ? { blocks } : {}),
    };
  }

  ended(trouble, requestId) {
    const now = performance.now();
    this.known.first = this.first ? (this.first - this.began) / 1000 : null;
    this.known.total = (now - this.began) / 1000;
    this.known.trouble = trouble;
    this.known.requestId = requestId;
    this.drawFoot();
  }

  drawFoot() {
    const { finish, usage, unisono, trouble, requestId, first, total } = this.known;
    // Renders all text before completion is announced, also in a tab that draws no frames.
    for (const part of this.parts.values()) part.draw(true);
    this.body.setAttribute("aria-busy", "false");
    const pace = usage?.output > 1 && total > first ? usage.output / (total - (first ?? 0)) : null;
    const facts = [
      trouble ? null : finish,
      usage && `${number(usage.input)} in${usage.cached ? ` (${number(usage.cached)} cached)` : ""}`,
      usage?.output !== undefined && `${number(usage.output)} out${usage.reasoning ? ` (${number(usage.reasoning)} reasoning)` : ""}`,
      first !== null && first !== undefined && `first token after ${seconds(first)}`,
      `${seconds(total)} in total`,
      pace && `${number(pace)} tokens/s`,
      unisono?.backend && `by ${unisono.backend}`,
      unisono?.failovers ? `${unisono.failovers} failovers` : null,
    ];
    const told = [el("p", { class: "facts" }, facts.filter(Boolean).map((fact) => el("span", {}, fact)))];
    if (trouble) told.unshift(el("p", { class: "trouble", role: "alert" }, visible(trouble)));
    for (const rule of unisono?.recoveries ?? []) {
      told.push(el("p", { class: "mended" }, el("code", { class: "rule" }, rule), " ", state.status?.rules?.[rule] ?? ""));
    }
    if (unisono?.unmet) told.push(el("p", { class: "trouble" }, visible(unisono.unmet)));
    for (const note of unisono?.notes ?? []) told.push(el("p", { class: "note" }, visible(String(note))));
    if (requestId) {
      this.next.replaceChildren(...[
        recorded(unisono) ? el("a", { href: `#/inspector/${encodeURIComponent(requestId)}` }, "Inspect its tokens") : null,
        el("a", { href: `#/requests/${encodeURIComponent(requestId)}` }, "Request"),
      ].filter(Boolean));
    }
    this.foot.replaceChildren(...told, this.next);
  }

  get saved() {
    const { items, blocks, known } = this;
    return { parts: [...this.parts].map(([key, part]) => [key, part.saved]), known, items, blocks };
  }

  static restored({ parts, known, items, blocks }, title) {
    const made = new Transcript(title);
    for (const [key, one] of parts) {
      const part = made.part(key, one.kind, one.heading);
      if (one.what) part.titled(...one.what);
      Object.assign(part, { name: one.name, id: one.id, approval: one.approval, choice: one.choice });
      part.set(one.text);
    }
    Object.assign(made, { known, items, blocks });
    made.drawFoot();
    return made;
  }
}

function parsedOr(text) {
  try {
    return JSON.parse(text || "{}");
  } catch {
    return {};
  }
}
