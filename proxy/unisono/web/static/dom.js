// Elements made of text and nothing else: nothing that a model, a tool or a server said is ever read as markup.

const SVG = "http://www.w3.org/2000/svg";

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
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

export function say(text) {
  document.getElementById("said").textContent = text;
}

// What is not seen, or would turn text around: controls, zero widths, directions, halves of pairs.
const UNSEEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u115f\u180e\u200b-\u200f\u2028-\u202f\u2060-\u206f\ufeff\ufff9-\uffff]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]|\udb40[\udc00-\udfff]/g;
const MOST_SPELLED = 2000;

// Text as nodes; characters that nobody sees are spelled out.
export function visible(text) {
  const made = document.createDocumentFragment();
  let from = 0;
  let spelled = 0;
  for (const found of text.matchAll(UNSEEN)) {
    if (found.index > from) made.append(text.slice(from, found.index));
    from = found.index + found[0].length;
    const name = `U+${found[0].codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}`;
    spelled += 1;
    made.append(spelled > MOST_SPELLED ? "\ufffd" : el("span", { class: "control", title: "a character nobody sees" }, name));
  }
  if (from < text.length) made.append(text.slice(from));
  return made;
}

export function number(value) {
  return value === null || value === undefined ? "–" : Math.round(value).toLocaleString("en-US");
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value > 0 && value < 0.0001) return `${Math.round(value * 1e6)} µs`;
  if (value < 1) return `${(value * 1000).toFixed(value < 0.01 ? 1 : 0)} ms`;
  if (value < 120) return `${value.toFixed(value < 10 ? 2 : 0)} s`;
  if (value < 7200) return `${Math.round(value / 60)} min`;
  return value < 172800 ? `${Math.round(value / 3600)} h` : `${Math.round(value / 86400)} d`;
}

export function clock(at) {
  return new Date(at * 1000).toLocaleTimeString([], { hour12: false });
}

export function day(at) {
  const date = new Date(at * 1000);
  const today = date.toDateString() === new Date().toDateString();
  return today ? clock(at) : `${date.toISOString().slice(0, 10)} ${clock(at)}`;
}

// A table that can be scrolled by keyboard where it is too wide.
export function table(name, heads, rows, empty) {
  if (!rows.length) return el("p", { class: "empty" }, empty);
  const head = heads.map((given) => {
    const [text, kind] = Array.isArray(given) ? given : [given, ""];
    return el("th", { scope: "col", class: kind || undefined }, text);
  });
  const kinds = heads.map((given) => (Array.isArray(given) ? given[1] : undefined));
  const body = rows.map((cells) => el("tr", {}, cells.map((cell, at) => el("td", { class: kinds[at] }, cell))));
  return el(
    "div",
    { class: "wide", role: "region", "aria-label": name, tabindex: "0" },
    el("table", {}, el("thead", {}, el("tr", {}, head)), el("tbody", {}, body)),
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
      button.textContent = "Not allowed here";
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

export function select(options, chosen) {
  return el("select", {}, options.map(([value, text]) => el("option", { value, selected: value === chosen }, text)));
}
