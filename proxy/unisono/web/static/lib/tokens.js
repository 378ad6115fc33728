// Token view: messages coloured by channel or role, special tokens as chips, repairs at their positions.
//
// A long output is rendered in batches, so that the page stays responsive. Arrow keys move from token to token.

import { el, say } from "/page/lib/dom.js";
import { visible } from "/page/lib/invisible.js";
import { number } from "/page/lib/format.js";

const STRETCH = 1000;
const ENDS = new Set(["<|end|>", "<|return|>", "<|call|>"]);

const sizeOf = (segments) => segments.reduce((sum, one) => sum + (one.kind === "text" ? one.tokens.length : 1), 0);

export class Tokens {
  constructor(segments, name, { follows } = {}) {
    this.segments = segments;
    this.follows = follows;
    this.total = sizeOf(segments);
    this.drawn = 0;
    this.at = 0;
    this.inside = 0;
    this.place = 0;
    this.message = null;
    this.ended = true;
    this.repairs = [];
    this.flow = el("div", { class: "flow", tabindex: "0", role: "group", "aria-label": `${name}: arrow keys move between tokens` });
    this.readout = el("p", { class: "readout", "aria-live": "polite" }, "Point at a token, or use the arrow keys.");
    this.more = el("button", { type: "button", class: "small", onclick: () => this.draw() });
    this.node = el("div", { class: "tokens" }, this.flow, el("div", { class: "row" }, this.readout, this.more));
    this.flow.addEventListener("mouseover", (event) => this.point(event.target.closest?.("[data-id]")));
    this.flow.addEventListener("keydown", (event) => this.moved(event));
    this.draw();
  }

  // Adds segments of an answer in progress. Beyond the first batch they are rendered on request only.
  append(segments) {
    this.segments.push(...segments);
    this.total += sizeOf(segments);
    const { flow } = this;
    const isAtEnd = flow.scrollHeight - flow.scrollTop - flow.clientHeight < 60;
    if (this.drawn < STRETCH) this.draw(STRETCH - this.drawn);
    else this.showRest();
    if (this.follows && isAtEnd) flow.scrollTop = flow.scrollHeight;
  }

  showRest() {
    this.more.hidden = this.drawn >= this.total;
    this.more.textContent = `Show more: ${number(this.total - this.drawn)} left`;
  }

  draw(most = STRETCH) {
    let room = most;
    while (this.at < this.segments.length && room > 0) {
      const segment = this.segments[this.at];
      if (segment.kind !== "text") {
        this.put(segment);
        this.at += 1;
        room -= 1;
        continue;
      }
      const tokens = segment.tokens.slice(this.inside, this.inside + room);
      this.text(segment.of, tokens);
      this.inside += tokens.length;
      room -= tokens.length;
      if (this.inside === segment.tokens.length) {
        this.at += 1;
        this.inside = 0;
      }
    }
    this.drawn += most - room;
    this.showRest();
  }

  begin() {
    this.message = el("div", { class: "said" });
    this.ended = false;
    this.hasBody = false;
    this.flow.append(this.message);
  }

  text(of, tokens) {
    if (this.ended) this.begin();
    if (of !== "header" && !this.hasBody) {
      this.hasBody = true;
      this.message.classList.add(`of-${of}`);
      this.message.dataset.of = of;
    }
    const spans = tokens.map(([text, ...ids]) => {
      const span = el("span", { class: of === "header" ? "t head" : "t", "data-id": ids.join(" "), "data-at": this.place });
      this.place += ids.length;
      span.said = text;
      if (text.includes("\n")) {
        for (const [at, line] of text.split("\n").entries()) {
          if (at) span.append(el("span", { class: "newline", "aria-hidden": "true" }, "↵"), "\n");
          span.append(visible(line));
        }
      } else {
        span.append(visible(text));
      }
      return span;
    });
    this.message.append(...spans);
  }

  put(segment) {
    switch (segment.kind) {
      case "special": {
        if (this.ended || segment.text === "<|start|>" || (segment.text === "<|channel|>" && this.hasBody)) this.begin();
        const known = segment.known ? "chip" : "chip unknown";
        this.message.append(el("span", { class: known, "data-id": segment.id, "data-at": this.place }, segment.known ? segment.text : `invalid token ${segment.id}`));
        this.place += 1;
        if (ENDS.has(segment.text)) this.ended = true;
        break;
      }
      case "repair": {
        const dropped = segment.dropped ? ` ${number(segment.dropped)} characters were dropped.` : "";
        const note = el("p", { class: "repair", tabindex: "-1" }, el("code", { class: "rule" }, visible(segment.rule)), ` ${segment.why}${dropped}`);
        this.repairs.push(note);
        (this.message ?? this.flow).append(note);
        break;
      }
      case "gap":
        this.flow.append(el("p", { class: "aside" }, `${number(segment.tokens)} tokens omitted because the recording was too large`));
        this.ended = true;
        break;
      default:
        (this.message ?? this.flow).append(el("p", { class: "aside" }, visible(segment.text)));
    }
  }

  // Scrolls to a repair, rendering as many tokens as necessary.
  reveal(number_) {
    while (this.repairs.length <= number_ && this.drawn < this.total) this.draw();
    const note = this.repairs[number_];
    note?.scrollIntoView({ block: "center" });
    note?.focus();
  }

  // Marks the token at a place, rendering as many tokens as necessary.
  mark(place) {
    while (this.place <= place && this.drawn < this.total) this.draw();
    const token = [...this.flow.querySelectorAll("[data-at]")].findLast((one) => Number(one.dataset.at) <= place);
    if (!token || place >= this.place) return;
    token.classList.add("differs");
    this.flow.scrollTop = token.offsetTop - this.flow.offsetTop - this.flow.clientHeight / 2;
  }

  point(token) {
    if (!token || token === this.current) return;
    this.current?.classList.remove("current");
    this.current = token;
    token.classList.add("current");
    const ids = token.dataset.id.split(" ");
    const text = JSON.stringify((token.said ?? token.textContent).slice(0, 60));
    const of = token.closest("[data-of]")?.dataset.of;
    this.readout.replaceChildren(visible(`token ${number(Number(token.dataset.at))} · id ${ids.join(", ")} · ${text}${of ? ` · ${of}` : ""}`));
  }

  moved(event) {
    const way = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!way || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    const all = this.flow.querySelectorAll("[data-id]");
    this.index = this.current && all[this.index] === this.current ? this.index : [...all].indexOf(this.current);
    this.index = Math.min(Math.max(this.index + way, 0), all.length - 1);
    this.point(all[this.index]);
    all[this.index]?.scrollIntoView({ block: "nearest" });
    if (this.index === all.length - 1 && this.drawn < this.total) say("“Show more” shows the remaining tokens");
  }
}
