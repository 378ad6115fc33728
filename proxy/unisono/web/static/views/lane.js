// One conversation of the playground: turns that can be edited, generated again and forked.

import { asked, events, json, reason } from "/page/lib/api.js";
import { el, say } from "/page/lib/dom.js";
import { visible } from "/page/lib/invisible.js";
import { recorded } from "/page/lib/store.js";
import { Tokens } from "/page/lib/tokens.js";
import { STREAMED, WHOLE } from "/page/views/answering.js";
import { toRequest } from "/page/views/asking.js";
import { Transcript } from "/page/views/transcript.js";

// Maximum characters of a complete answer that screen readers read out.
const MOST_SAID = 300;

const action = (text, act) => el("button", { type: "button", class: "small quiet", onclick: act }, text);

export class Lane {
  // `owner` has `settings(lane)`, `changed()`, `fork(lane, at)`, `showsTokens` and `failed(error, lane)`.
  constructor(name, owner) {
    this.name = name;
    this.owner = owner;
    this.turns = [];
    this.running = null;
    this.node = el("section", { class: "lane", "aria-label": `Conversation ${name}` });
    this.title = el("p", { class: "lane-title", hidden: true });
    this.thread = el("div", { class: "thread" });
    this.node.append(this.title, this.thread);
  }

  // -- turns

  add(turn, transcript) {
    const entry = { turn, transcript };
    entry.node = transcript ? transcript.node : this.nodeOf(entry);
    this.turns.push(entry);
    this.thread.append(entry.node);
    return entry;
  }

  // Removes a turn and all later ones.
  cut(at) {
    for (const entry of this.turns.splice(at)) entry.node.remove();
  }

  indexOf(entry) {
    return this.turns.indexOf(entry);
  }

  // Calls without results, and approvals without decisions, after the last answer.
  get open() {
    return this.turns.filter(({ turn }) => (turn.kind === "tool" || turn.kind === "approval") && turn.isOpen);
  }

  nodeOf(entry) {
    const { turn } = entry;
    if (turn.kind === "user") {
      const body = el("div", { class: "turn-text" }, visible(turn.text));
      const node = el("article", { class: "turn is-user", "aria-label": "Your message" }, body,
        el("div", { class: "row turn-actions" }, action("Edit", () => this.edit(entry, body)), action("Fork", () => this.owner.fork(this, this.indexOf(entry)))));
      return node;
    }
    if (turn.kind === "approval") {
      const node = el("article", { class: "turn is-tool", "aria-label": "Approval" });
      const name = turn.name ?? turn.id;
      const decide = (approve) => { Object.assign(turn, { approve, isOpen: false }); draw(); this.owner.decided(this); };
      const draw = () => node.replaceChildren(turn.isOpen ? el("div", { class: "row" }, el("span", {}, `Run ${name}?`),
        el("button", { type: "button", class: "small primary", onclick: () => decide(true) }, "Approve"), el("button", { type: "button", class: "small", onclick: () => decide(false) }, "Deny"))
        : el("p", { class: "note" }, `${turn.approve ? "Approved" : "Denied"}: ${name}`));
      draw();
      return node;
    }
    const text = el("textarea", { rows: 2, spellcheck: "false", "aria-label": `Result of ${turn.called}`, placeholder: "Result of the call, for example {\"temperature\": 21}" });
    text.value = turn.text;
    text.addEventListener("input", () => { turn.text = text.value; });
    return el("article", { class: "turn is-tool", "aria-label": "Tool result" }, el("p", { class: "part-title" }, "Result of ", el("code", {}, visible(turn.called ?? ""))), text);
  }

  edit(entry, body) {
    const text = el("textarea", { rows: 4, spellcheck: "false", "aria-label": "Edited message" });
    text.value = entry.turn.text;
    const done = () => { form.replaceWith(body); entry.node.querySelector(".turn-actions button").focus(); };
    const form = el("form", { class: "stack" }, text, el("div", { class: "row" }, el("button", { type: "submit", class: "small primary" }, "Send again"), el("button", { type: "button", class: "small", onclick: done }, "Cancel")));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.running) return;
      this.cut(this.indexOf(entry));
      this.add({ kind: "user", text: text.value });
      this.send();
    });
    body.replaceWith(form);
    text.focus();
  }

  // -- an answer

  get request() {
    return toRequest(this.owner.settings(this), this.turns.map(({ turn }) => turn));
  }

  async send() {
    if (this.running) return;
    const given = this.owner.settings(this);
    let request;
    try {
      request = this.request;
    } catch (error) {
      this.owner.failed(error, this);
      return;
    }
    for (const { turn } of this.turns) if (turn.kind === "tool") turn.isOpen = false;
    const running = new AbortController();
    this.running = running;
    const transcript = new Transcript(given.model);
    const entry = this.add({ kind: "assistant", text: "" }, transcript);
    this.owner.changed();
    this.follow();
    let trouble = "";
    let requestId = "";
    try {
      const shows = this.owner.showsTokens;
      // The tokens are requested as part of the stream, because a separate request might reach a different process.
      const headers = { ...request.headers, ...(shows && request.body.stream ? { "x-unisono-tokens": "comments" } : {}) };
      const onSend = () => { transcript.begin(); say("The answer is being generated"); };
      const answer = await asked(request.path, { body: request.body, headers, signal: running.signal, onSend });
      requestId = answer.headers.get("x-request-id");
      if (request.body.stream) {
        const onTokens = shows ? this.tokensBeside(transcript) : undefined;
        for await (const event of events(answer, onTokens)) {
          STREAMED[given.surface](event, transcript);
          this.follow();
        }
        if (!transcript.known.finish) throw new Error("The connection was lost during the stream.");
      } else {
        WHOLE[given.surface](await answer.json(), transcript);
      }
    } catch (error) {
      trouble = running.signal.aborted ? "Stopped." : reason(error);
    }
    this.finish(entry, trouble, requestId);
  }

  finish(entry, trouble, requestId) {
    const { transcript } = entry;
    transcript.ended(trouble, requestId);
    entry.turn = transcript.turn;
    this.actions(entry);
    if (!trouble) this.openTurns(entry.turn);
    this.running = null;
    // An error is announced by its own alert.
    say(trouble ? "" : `The answer is complete. ${entry.turn.text.slice(0, MOST_SAID)}`);
    this.follow();
    this.owner.changed();
    if (requestId && this.owner.showsTokens && recorded(transcript.known.unisono)) this.showRecording(transcript, requestId);
  }

  openTurns(turn) {
    for (const call of turn.calls ?? []) this.add({ kind: "tool", callId: call.id, called: call.name, text: "", isOpen: true });
    for (const approval of turn.approvals ?? []) this.add({ kind: "approval", id: approval.id, name: approval.name, isOpen: true });
  }

  actions(entry) {
    entry.transcript.next.append(
      action("Regenerate", () => {
        if (this.running) return;
        this.cut(this.indexOf(entry));
        this.send();
      }),
      action("Fork", () => this.owner.fork(this, this.indexOf(entry) + 1)));
  }

  stop() {
    this.running?.abort();
  }

  // Keeps the end of the answer visible, unless the user scrolled up.
  follow() {
    if (this.following) return;
    const below = document.documentElement.scrollHeight - innerHeight - scrollY;
    if (below > 240 && this.turns.length > 2) return;
    this.following = requestAnimationFrame(() => {
      this.following = 0;
      if (this.node.isConnected && this.running) scrollTo({ top: document.documentElement.scrollHeight });
    });
  }

  // -- tokens beside the answer

  // Returns a function that adds segments.
  tokensBeside(transcript) {
    const tokens = new Tokens([], "Tokens of the answer", { follows: true });
    transcript.side.replaceChildren(el("p", { class: "part-title" }, "Harmony, token by token"), tokens.node);
    return (segments) => {
      transcript.side.hidden = false;
      tokens.append(segments);
    };
  }

  // A recording also contains the recoveries, at the positions where they were decided.
  async showRecording(transcript, id) {
    for (let left = 8; left > 0; left -= 1) {
      try {
        const told = await json("/v1/inspect", { body: { id }, quiet: true });
        const views = told.steps.map((step) => new Tokens(step.output, "Tokens of the answer"));
        transcript.side.replaceChildren(el("p", { class: "part-title" }, "Harmony, token by token"), ...views.map((view) => view.node));
        transcript.side.hidden = false;
        return;
      } catch (error) {
        if (error.status !== 404) return;
        await new Promise((resolve) => setTimeout(resolve, 300));
      }
    }
  }

  // -- saving

  get saved() {
    return this.turns.map(({ turn, transcript }) => (transcript ? { turn: transcript.turn, answer: transcript.saved } : { turn }));
  }

  restore(saved, title) {
    this.cut(0);
    for (const { turn, answer } of saved) {
      const transcript = answer ? Transcript.restored(answer, title) : undefined;
      const entry = this.add(turn, transcript);
      if (transcript) this.actions(entry);
    }
  }
}
