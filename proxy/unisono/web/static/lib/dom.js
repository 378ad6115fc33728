// Creates elements from text only: output of models, tools and servers is never parsed as markup, and invisible
// characters are made visible.

import { visible } from "/page/lib/invisible.js";

const SVG = "http://www.w3.org/2000/svg";

const SAID = new Set(["title", "aria-label"]);

export function el(tag, given = {}, ...children) {
  return filled(document.createElement(tag), given, children);
}

export function svg(tag, given = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), given, children);
}

function filled(node, given, children) {
  for (const [name, value] of Object.entries(given)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else node.setAttribute(name, SAID.has(name) ? visible(String(value)).textContent : String(value));
  }
  const there = children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false);
  node.append(...there.map((child) => (typeof child === "string" ? visible(child) : child)));
  return node;
}

export function say(text) {
  document.getElementById("said").replaceChildren(visible(text));
}

// Scrolls an element into view if its beginning is outside the window or near its lower edge.
export function shown(node) {
  const { top } = node.getBoundingClientRect();
  if (top < 0 || top > innerHeight * 0.7) node.scrollIntoView({ block: "start" });
}

// Container for an error message. `tell` fills the container; an empty text hides it.
export function complaint() {
  return el("p", { class: "trouble", role: "alert", hidden: true });
}

export function tell(place, text) {
  place.replaceChildren(visible(text));
  place.hidden = !text;
}

// Creates a table that can be scrolled by keyboard if it is too wide, or `tall`. Rows are lists of cells, or `{key,
// cells}`, or groups of them: `{key, head, rows}`.
export function table(name, heads, rows, empty, tall) {
  if (!rows.length) return el("p", { class: "empty" }, empty);
  const kinds = heads.map((given) => (Array.isArray(given) ? given[1] : undefined));
  const head = heads.map((given, at) => el("th", { scope: "col", class: kinds[at] }, Array.isArray(given) ? given[0] : given));
  const line = (row) => el("tr", { "data-key": row.key }, (row.cells ?? row).map((cell, at) => el("td", { class: kinds[at] }, cell)));
  const grouped = (one) => el("tbody", { "data-key": one.key }, el("tr", {}, one.head), one.rows.map(line));
  const bodies = rows[0].rows ? rows.map(grouped) : el("tbody", {}, rows.map(line));
  return el(
    "div",
    { class: tall ? "wide tall" : "wide", role: "region", "aria-label": name, tabindex: "0" },
    el("table", {}, el("thead", {}, el("tr", {}, head)), bodies),
  );
}

export function copier(what, text) {
  const button = el("button", { type: "button", class: "small" }, `Copy ${what}`);
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text());
      say(`${what} copied`);
      button.textContent = "Copied";
    } catch {
      button.textContent = "Copying is not allowed";
    }
    setTimeout(() => { button.textContent = `Copy ${what}`; }, 1600);
  });
  return button;
}

let made = 0;
// A label above its field.
export function field(name, control, hint) {
  made += 1;
  const id = control.id || `field-${made}`;
  control.id = id;
  const note = hint ? el("span", { class: "hint", id: `${id}-hint` }, hint) : null;
  if (note) control.setAttribute("aria-describedby", note.id);
  return el("div", { class: "field" }, el("label", { for: id }, name), control, note);
}

// A number above its name.
export function fact(name, value, more, kind) {
  return el("div", { class: "sum" }, el("span", { class: "name" }, name), el("strong", { class: kind }, value), el("span", { class: "muted" }, more));
}

// A group of buttons of which one is pressed. `choose` is called with the value of a pressed button.
export function segmented(name, options, chosen, choose) {
  const buttons = options.map(([value, text]) => el("button", { type: "button", class: "small", "aria-pressed": String(value === chosen), onclick: () => {
    for (const button of buttons) button.setAttribute("aria-pressed", String(button.value === String(value)));
    choose(value);
  }, value }, text));
  return el("div", { class: "segmented", role: "group", "aria-label": name }, buttons);
}

export function section(id, title, ...children) {
  return el("section", { "aria-labelledby": `h-${id}` }, el("h2", { id: `h-${id}` }, title), children);
}

export function empty(...text) {
  return el("p", { class: "empty" }, text);
}

export function loading() {
  return el("p", { class: "empty late" }, "Loading …");
}

export function facts(rows) {
  const given = rows.filter(([, value]) => value !== null && value !== undefined && value !== "" && value !== false);
  return el("dl", { class: "facts-list" }, given.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, typeof value === "number" ? String(value) : value))));
}

// Opens a dialog with a heading. `fill` returns the content; it is called with a function that closes the dialog.
export function dialog(title, fill) {
  const node = el("dialog", { class: "sheet", "aria-label": title });
  const close = () => { node.close(); node.remove(); };
  node.append(el("div", { class: "heading" }, el("h2", {}, title), el("button", { type: "button", class: "small quiet", "aria-label": "Close", onclick: close }, "Close")), ...[fill(close)].flat());
  node.addEventListener("cancel", (event) => { event.preventDefault(); close(); });
  document.body.append(node);
  node.showModal();
  return { node, close };
}

export function select(options, chosen) {
  return el("select", {}, options.map(([value, text]) => el("option", { value, selected: value === chosen }, text)));
}
