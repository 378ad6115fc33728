// Growing answer: reasoning apart from calls and text, and details of its generation below.

import { copier, el, number, seconds, visible } from "/page/dom.js";

const MOST_SHOWN = 100_000;
// A joiner, or a lone surrogate.
const OPEN_END = /[\u200c\u200d\ud800-\udbff]$/;
// An emoji, its modifier and a joiner.
const LONGEST_BEFORE = 8;

// Growing text. It is rendered at most once per frame, up to a size that the page can handle.
class Part {
  constructor(kind, title) {
    this.kind = kind;
    this.pieces = [];
    this.length = 0;
    this.shown = 0;
    this.waiting = "";
    this.before = "";
    this.frame = 0;
    this.title = el("span", { class: "part-title" }, title);
    this.body = el("div", { class: "part-body" });
    this.note = el("p", { class: "note", hidden: true });
    const head = el("div", { class: "part-head" }, this.title, copier(title.toLowerCase(), () => this.text));
    this.node = el("section", { class: `part of-${kind}`, "aria-label": title }, head, this.body, this.note);
  }

  get text() {
    return this.pieces.join("");
  }

  named(name, id) {
    this.name = name;
    this.id = id;
    this.titled("Tool call", name);
  }

  titled(what, name) {
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
    this.add(text);
  }

  // The end of a chunk can only be rendered once the next chunk is there, or the text is `complete`.
  draw(complete) {
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    const upto = this.waiting.length - (!complete && OPEN_END.test(this.waiting) ? 1 : 0);
    const text = this.waiting.slice(0, Math.min(upto, MOST_SHOWN - this.shown));
    this.waiting = this.waiting.slice(upto);
    this.shown += text.length;
    if (text) this.body.append(visible(text, this.before));
    this.before = (this.before + text).slice(-LONGEST_BEFORE);
    if (this.length > this.shown + this.waiting.length) {
      this.note.textContent = `Only the first ${number(this.shown)} of ${number(this.length)} characters are shown.`;
      this.note.hidden = false;
    }
  }
}

export class Transcript {
  // `rules` maps rules to sentences; `linked` means that such an answer is recorded.
  constructor(rules, linked, title) {
    this.rules = rules;
    this.linked = linked;
    this.parts = new Map();
    this.known = {};
    this.began = performance.now();
    this.first = null;
    // Not a live region: a stream of tokens would flood screen readers. Only the end is announced.
    this.body = el("div", { class: "parts", "aria-busy": "true" });
    this.next = el("div", { class: "row next" });
    this.foot = el("div", { class: "foot" });
    this.node = el("article", { class: "answer", "aria-label": "Answer" }, el("p", { class: "asked" }, visible(title)), this.body, this.foot);
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

  // Parts that the next request includes.
  get message() {
    const of = (kind) => [...this.parts.values()].filter((part) => part.kind === kind);
    return {
      role: "assistant",
      content: of("final").map((part) => part.text).join(""),
      calls: of("call").map((part) => ({ id: part.id, name: part.name, text: part.text })),
    };
  }

  ended(trouble, requestId) {
    const { finish, usage, unisono } = this.known;
    const now = performance.now();
    // Renders all text before completion is announced, also in a tab that draws no frames.
    for (const part of this.parts.values()) part.draw(true);
    this.body.setAttribute("aria-busy", "false");
    const facts = [
      trouble ? null : finish,
      usage && `${number(usage.input)} in${usage.cached ? ` (${number(usage.cached)} cached)` : ""}`,
      usage && `${number(usage.output)} out${usage.reasoning ? ` (${number(usage.reasoning)} reasoning)` : ""}`,
      this.first && `first token after ${seconds((this.first - this.began) / 1000)}`,
      `${seconds((now - this.began) / 1000)} in total`,
      unisono?.backend && `by ${unisono.backend}`,
      unisono?.failovers ? `${unisono.failovers} failovers` : null,
    ];
    const told = [el("p", { class: "facts" }, facts.filter(Boolean).map((fact) => el("span", {}, fact)))];
    if (trouble) told.unshift(el("p", { class: "trouble", role: "alert" }, visible(trouble)));
    for (const rule of unisono?.recoveries ?? []) {
      told.push(el("p", { class: "mended" }, el("code", { class: "rule" }, rule), " ", this.rules[rule] ?? ""));
    }
    if (unisono?.unmet) told.push(el("p", { class: "trouble" }, visible(unisono.unmet)));
    for (const note of unisono?.notes ?? []) told.push(el("p", { class: "note" }, visible(String(note))));
    if (requestId && this.linked(unisono)) {
      this.next.append(el("a", { href: `#/inspector/${encodeURIComponent(requestId)}` }, "Inspect its tokens"));
    }
    this.foot.replaceChildren(...told, this.next);
  }
}
