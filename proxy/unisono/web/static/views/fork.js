// Fork of a recording: the gateway generates the rest of an answer again, and both answers are shown side by side.

import { json, reason } from "/page/lib/api.js";
import { complaint, copier, el, field, say, select, tell } from "/page/lib/dom.js";
import { counted, number } from "/page/lib/format.js";
import { seesAll, state } from "/page/lib/store.js";
import { Tokens } from "/page/lib/tokens.js";

export function forkOf(about, steps) {
  const step = select(steps.map(({ step: number }) => [String(number), `step ${number}`]), String(steps.at(-1)?.step ?? 0));
  const at = el("input", { type: "number", min: "0", value: "0" });
  const effort = select([["", "as recorded"], ["low", "low"], ["medium", "medium"], ["high", "high"]], "");
  const temperature = el("input", { type: "number", min: "0", max: "2", step: "0.1", value: "0" });
  const members = seesAll() ? (state.status?.models ?? []).filter(({ id }) => id === about.model).flatMap((model) => model.deployments ?? []) : [];
  const deployment = select([["", "any"], ...members.map(({ name }) => [name, name])], "");
  const result = el("textarea", { rows: 3, class: "mono", spellcheck: "false" });
  const replaces = el("input", { type: "checkbox" });
  const go = el("button", { type: "submit", class: "primary" }, "Fork");
  const stop = el("button", { type: "button", hidden: true, onclick: () => aborted?.abort() }, "Stop");
  const trouble = complaint();
  const place = el("div", {});
  let aborted = null;
  const from = () => Math.max(0, Math.floor(Number(at.value)) || 0);
  // The command counts the tokens of all steps.
  const command = () => {
    const before = steps.filter((one) => one.step < Number(step.value)).reduce((sum, one) => sum + one.generated, 0);
    const changes = [effort.value && `--effort ${effort.value}`, Number(temperature.value) ? `--temperature ${Number(temperature.value)}` : "", /^[\w-]+$/.test(deployment.value) && `--backend ${deployment.value}`];
    return [`unisono trace ${about.id} --fork-at ${before + from()}`, ...changes].filter(Boolean).join(" ");
  };
  addEventListener("hashchange", () => aborted?.abort(), { once: true });
  result.addEventListener("input", () => { replaces.checked = true; });
  const form = el("form", { class: "fork" },
    el("div", { class: "row" }, steps.length > 1 ? field("Step", step) : null, field("Fork at generated token", at), field("Reasoning effort", effort), field("Temperature", temperature),
      members.length > 1 ? field("Deployment", deployment) : null),
    el("details", {}, el("summary", {}, "Different tool result"), field("Text of the last tool result before this token", result),
      el("label", { class: "check" }, replaces, " Replace the recorded text")),
    // An id with other characters might have a special meaning in a shell.
    el("div", { class: "row" }, go, stop, /^[\w-]+$/.test(about.id) ? copier("fork command", command) : null));
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    tell(trouble, "");
    place.replaceChildren();
    aborted = new AbortController();
    go.disabled = true;
    stop.hidden = false;
    say("Generating the fork");
    try {
      const body = { at: from(), step: Number(step.value), temperature: Number(temperature.value) || 0, ...(effort.value && { effort: effort.value }), ...(replaces.checked && { tool_result: result.value.toWellFormed() }) };
      const headers = deployment.value ? { "x-unisono-deployment": encodeURIComponent(deployment.value) } : {};
      await compare(place, await json(`/v1/traces/${encodeURIComponent(about.id)}/fork`, { body, headers, signal: aborted.signal }));
    } catch (error) {
      if (error.name !== "AbortError") tell(trouble, reason(error));
    }
    go.disabled = false;
    stop.hidden = true;
  });
  return el("details", { class: "panel" }, el("summary", {}, "Fork this answer"), form, trouble, place);
}

// Shows two token views of the step, with the first different token marked in both.
async function compare(place, fork) {
  if (fork.forked === null) throw new Error("A guardrail masked the new answer, so its tokens cannot be shown.");
  const different = fork.first_difference;
  const verdict = different === null ? "The fork is the same as the recording." : `First difference at token ${number(different)}.`;
  const views = await Promise.all([["Recorded", fork.recorded], ["Forked", fork.forked]].map(async ([name, tokens]) => {
    const told = await json("/v1/inspect", { body: { tokens: [...fork.generated, ...tokens], all_output: true } });
    return [name, tokens.length, new Tokens(told.steps.flatMap((step) => step.output), `${name} answer`)];
  }));
  say(verdict);
  const columns = views.map(([name, count, view]) => el("section", { "aria-label": `${name} answer` }, el("h3", {}, `${name}: ${counted(count, "token")} from the fork`), view.node));
  place.replaceChildren(el("p", { class: different === null ? "well" : "note" }, verdict), el("div", { class: "forks" }, columns));
  if (different !== null) for (const [, , view] of views) view.mark(fork.generated.length + different - fork.at);
}
