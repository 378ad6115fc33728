// Dialog before a change that cannot be undone.

import { reason } from "/page/lib/api.js";
import { complaint, dialog, el, tell } from "/page/lib/dom.js";

// `act` makes the change, and `after` is called when the change is made. The dialog stays open after an error.
export function confirmed(question, consequence, verb, act, after) {
  dialog(question, (close) => {
    const trouble = complaint();
    const yes = el("button", { type: "button", class: "danger", onclick: () => act().then(() => { close(); after(); }, (error) => tell(trouble, reason(error))) }, verb);
    return [el("p", {}, consequence), trouble, el("div", { class: "row" }, yes, el("button", { type: "button", onclick: close }, "Cancel"))];
  });
}
