// Replaces content but leaves equal nodes alone, so that scroll position, selection and keyboard focus survive.
// Elements with a `data-key` are preserved when they move among their siblings. Children that are null or undefined are
// left out.

export function renew(old, ...children) {
  const fresh = document.createDocumentFragment();
  fresh.append(...children.filter((child) => child !== null && child !== undefined));
  within(old, fresh);
}

function within(old, fresh) {
  const after = [...fresh.childNodes];
  const keys = new Set(after.map(keyOf));
  const kept = new Map();
  for (const node of [...old.childNodes]) {
    const key = keyOf(node);
    if (key === undefined) continue;
    if (keys.has(key) && !kept.has(key)) kept.set(key, node);
    else node.remove();
  }
  let place = old.firstChild;
  for (const node of after) {
    const key = keyOf(node);
    const had = key === undefined ? place : kept.get(key);
    if (!had || (key === undefined && keyOf(had) !== undefined)) {
      old.insertBefore(node, place);
      continue;
    }
    kept.delete(key);
    if (had !== place) old.insertBefore(had, place);
    place = had.nextSibling;
    if (!had.isEqualNode(node)) changed(had, node);
  }
  while (place) {
    const next = place.nextSibling;
    place.remove();
    place = next;
  }
}

const keyOf = (node) => node.dataset?.key;

function changed(had, node) {
  // A button is always replaced, because its listener belongs to its old content.
  if (had.nodeType !== Node.ELEMENT_NODE || had.nodeName !== node.nodeName || had.nodeName === "BUTTON") {
    const hasFocus = had === document.activeElement;
    had.replaceWith(node);
    if (hasFocus) node.focus();
    return;
  }
  for (const { name } of [...had.attributes]) if (!node.hasAttribute(name)) had.removeAttribute(name);
  for (const { name, value } of node.attributes) if (had.getAttribute(name) !== value) had.setAttribute(name, value);
  within(had, node);
}
