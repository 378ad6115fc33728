// Markdown of a model, whose output may be hostile. marked parses the Markdown, and DOMPurify creates elements of the
// few permitted kinds. HTML in the output stays text, images are not loaded, and only http, https and mailto links
// remain.

import { marked } from "/page/vendor/marked.js";
import "/page/vendor/purify.js";
import { copier, el } from "/page/lib/dom.js";
import { visible } from "/page/lib/invisible.js";

const TAGS = ["p", "strong", "em", "del", "code", "pre", "blockquote", "ul", "ol", "li", "a", "br", "hr", "table", "thead", "tbody", "tr", "th", "td"];
const PURE = {
  ALLOWED_TAGS: TAGS,
  ALLOWED_ATTR: ["href", "start", "align", "class"],
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  ALLOWED_URI_REGEXP: /^(?:https?:|mailto:)/i,
  RETURN_DOM_FRAGMENT: true,
};
// Maximum characters of text that is parsed again in each frame, and of a block that is parsed at all.
const MOST_TAIL = 6000;
const MOST_BLOCK = 20_000;

const escaped = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;").replaceAll('"', "&quot;");

marked.use({
  gfm: true,
  renderer: {
    html: ({ text }) => escaped(text),
    image: ({ raw }) => escaped(raw),
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
    // A heading in the answer must not become a heading of the page.
    heading({ tokens }) {
      return `<p><strong>${this.parser.parseInline(tokens)}</strong></p>`;
    },
  },
});

export function rendered(text) {
  if (text.length > MOST_BLOCK) return plain(text);
  let made;
  try {
    made = globalThis.DOMPurify.sanitize(marked.parse(text, { async: false }), PURE);
  } catch {
    return plain(text);
  }
  for (const link of made.querySelectorAll("a")) {
    link.setAttribute("rel", "noopener noreferrer nofollow");
    link.setAttribute("target", "_blank");
  }
  for (const pre of made.querySelectorAll("pre")) pre.replaceWith(codeBlock(pre));
  for (const node of made.querySelectorAll("[class]")) if (!node.closest(".code-block")) node.removeAttribute("class");
  for (const node of made.querySelectorAll("table")) {
    const wide = el("div", { class: "wide", role: "group", "aria-label": "Table in the answer", tabindex: "0" });
    node.replaceWith(wide);
    wide.append(node);
  }
  // Each block has the direction of its text.
  for (const node of made.querySelectorAll("p, ul, ol, td, th")) node.setAttribute("dir", "auto");
  spelled(made);
  return made;
}

function plain(text) {
  const made = document.createDocumentFragment();
  made.append(el("p", { class: "as-is" }, visible(text)));
  return made;
}

function codeBlock(pre) {
  const code = pre.querySelector("code");
  const language = /language-([\w+#.-]{1,20})/.exec(code?.className ?? "")?.[1] ?? "";
  const text = pre.textContent;
  return el("div", { class: "code-block" },
    el("div", { class: "code-head" }, el("span", {}, language), copier("code", () => text)),
    el("pre", { tabindex: "0", "aria-label": language ? `Code in ${language}` : "Code" }, visible(text)));
}

// Spells out invisible characters in all texts.
function spelled(made) {
  const walker = document.createTreeWalker(made, NodeFilter.SHOW_TEXT);
  const texts = [];
  while (walker.nextNode()) texts.push(walker.currentNode);
  for (const text of texts) {
    const shown = visible(text.data);
    if (shown.childNodes.length !== 1 || shown.firstChild.nodeType !== Node.TEXT_NODE) text.replaceWith(shown);
  }
}

const FENCE = /^ {0,3}(`{3,}|~{3,})/;
// A line that continues the block before a blank line: an indented line, an item of a list, a quotation.
const CONTINUES = /^(?:\s|[-*+] |\d{1,9}[.)] |>|\|)/;

// Growing Markdown. Complete blocks are rendered once. The last block may still change and is rendered in each frame.
export class MarkdownBody {
  constructor(node) {
    this.node = node;
    this.tail = el("div", { class: "md-tail" });
    node.append(this.tail);
    this.pending = "";
    this.scanned = 0;
    this.fence = "";
    this.cut = 0;
    this.plainLength = 0;
  }

  add(text, complete) {
    this.pending += text;
    this.scan();
    if (complete) this.cut = this.pending.length;
    if (this.cut) {
      this.tail.before(rendered(this.pending.slice(0, this.cut)));
      this.pending = this.pending.slice(this.cut);
      this.scanned -= this.cut;
      this.cut = this.plainLength = 0;
      this.tail.replaceChildren();
    }
    this.drawTail();
  }

  // Sets `cut` to the last boundary between two blocks.
  scan() {
    for (;;) {
      const end = this.pending.indexOf("\n", this.scanned);
      if (end < 0) return;
      const line = this.pending.slice(this.scanned, end);
      const mark = FENCE.exec(line)?.[1];
      if (this.fence) {
        if (mark?.startsWith(this.fence) && line.trim() === mark) this.fence = "";
      } else if (mark) this.fence = mark;
      else if (!line.trim()) {
        const next = this.pending.slice(end + 1, end + 12);
        // Only the next line shows whether the block continues.
        if (!next) return;
        if (!CONTINUES.test(next) || end - this.cut > MOST_TAIL) this.cut = end + 1;
      }
      this.scanned = end + 1;
    }
  }

  drawTail() {
    if (!this.pending) return;
    // A long block is appended as text until it is complete, so that a frame takes little time.
    if (this.pending.length > MOST_TAIL || this.fence) {
      if (!this.plainLength) this.tail.replaceChildren(el("pre", { class: "md-plain" }));
      this.tail.firstChild.append(visible(this.pending.slice(this.plainLength)));
      this.plainLength = this.pending.length;
      return;
    }
    this.plainLength = 0;
    this.tail.replaceChildren(rendered(this.pending));
  }
}
