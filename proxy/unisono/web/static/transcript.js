// An answer as it grows: reasoning apart from calls and text, and below it how it came to be.

import { copier, el, number, seconds, visible } from "/page/dom.js";

const MOST_SHOWN = 100_000;

// Text that grows. What is drawn is drawn once for each frame, and never more than a page can bear.
class Part {
  constructor(kind, title) {
    this.kind = kind;
    this.pieces = [];
    this.length = 0;
    this.shown = 0;
    this.waiting = [];
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
    this.title.replaceChildren("Tool call ", el("code", {}, visible(name.slice(0, 200))));
  }

  add(text) {
    this.pieces.push(text);
    this.length += text.length;
    this.waiting.push(text);
    this.frame ||= requestAnimationFrame(() => this.draw());
  }

  set(text) {
    const has = this.text;
    if (text === has) return;
    if (text.startsWith(has)) {
      this.add(text.slice(has.length));
      return;
    }
    this.pieces = [];
    this.waiting = [];
    this.length = this.shown = 0;
    this.body.replaceChildren();
    this.add(text);
  }

  draw() {
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    const text = this.waiting.join("").slice(0, MOST_SHOWN - this.shown);
    this.waiting = [];
    this.shown += text.length;
    if (text) this.body.append(visible(text));
    if (this.length > this.shown) {
      this.note.textContent = `Shown are the first ${number(this.shown)} of ${number(this.length)} characters.`;
      this.note.hidden = false;
    }
  }
}

export class Transcript {
  // `rules` are the sentences by rule; `linked` says whether a recording of such an answer is kept.
  constructor(rules, linked, title) {
    this.rules = rules;
    this.linked = linked;
    this.parts = new Map();
    this.known = {};
    this.began = performance.now();
    this.first = null;
    this.body = el("div", { class: "parts", "aria-live": "polite", "aria-busy": "true" });
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

  // What of it goes into the next request.
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
    // All of the text stands there before it is said to be complete, in a tab that draws no frames too.
    for (const part of this.parts.values()) part.draw();
    this.body.setAttribute("aria-busy", "false");
    const facts = [
      trouble ? null : finish,
      usage && `${number(usage.input)} in${usage.cached ? ` (${number(usage.cached)} cached)` : ""}`,
      usage && `${number(usage.output)} out${usage.reasoning ? ` (${number(usage.reasoning)} reasoning)` : ""}`,
      this.first && `first after ${seconds((this.first - this.began) / 1000)}`,
      `${seconds((now - this.began) / 1000)} in all`,
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
      this.next.append(el("a", { href: `#/inspector/${encodeURIComponent(requestId)}` }, "Look at its tokens"));
    }
    this.foot.replaceChildren(...told, this.next);
  }
}
