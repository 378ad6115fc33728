// Models: deployments with their state, and one prompt on two of them side by side.

import { complaint, el, field, loading, section, tell } from "/page/lib/dom.js";
import { renew } from "/page/lib/renew.js";
import { reason } from "/page/lib/api.js";
import { watch } from "/page/lib/store.js";
import { deploymentTable, plainModels } from "/page/views/deployments.js";

export function models(main) {
  const trouble = complaint();
  const sought = el("input", { type: "search", spellcheck: "false", autocapitalize: "off" });
  const unwell = el("input", { type: "checkbox" });
  const seeking = el("form", { class: "inline seeking", "aria-label": "Filter deployments" },
    field("Model or deployment", sought), el("label", { class: "check" }, unwell, " Only deployments that are not ready"));
  const place = el("div", {}, loading());
  let last = null;
  const redraw = () => last && renew(place, last.minutes
    ? deploymentTable(last, { text: sought.value.trim().toLowerCase(), unwell: unwell.checked })
    : plainModels(last, { text: sought.value.trim().toLowerCase(), unwell: unwell.checked }));
  seeking.addEventListener("input", redraw);
  seeking.addEventListener("submit", (event) => event.preventDefault());
  main.append(el("h1", {}, "Models"), trouble, section("deployments", "Deployments", seeking, place));
  return watch(({ status, trouble: failed }) => {
    if (failed?.status) tell(trouble, reason(failed));
    if (!status) return;
    last = status;
    redraw();
  });
}
