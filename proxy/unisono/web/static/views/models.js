// Models: deployments with their checks, draining, adding and removing, prices, and a comparison of two deployments.

import { json, query, reason } from "/page/lib/api.js";
import { confirmed } from "/page/lib/confirm.js";
import { complaint, dialog, el, field, loading, section, select, table, tell } from "/page/lib/dom.js";
import { dollars } from "/page/lib/format.js";
import { renew } from "/page/lib/renew.js";
import { changesAll, refresh, seesAll, watch } from "/page/lib/store.js";
import { deploymentTable, plainModels } from "/page/views/deployments.js";

const MANY = 12;
// Labels of check results, as `unisono check` prints them.
const RESULTS = { ok: "ok", note: "not supported", warning: "warning", fatal: "failed" };

export function models(main) {
  const trouble = complaint();
  const sought = el("input", { type: "search", spellcheck: "false", autocapitalize: "off" });
  const unwell = el("input", { type: "checkbox" });
  const seeking = el("form", { class: "inline seeking", "aria-label": "Filter deployments" },
    field("Model or deployment", sought), el("label", { class: "check" }, unwell, " Only deployments that are not ready"));
  const place = el("div", {}, loading());
  const prices = el("div");
  const add = el("button", { type: "button", class: "primary", hidden: true, onclick: () => addForm(reload) }, "Add a deployment");
  const compare = new Comparison();
  let last = null;
  let known = new Map();
  const failed = (error) => tell(trouble, reason(error));
  const redraw = () => {
    if (!last) return;
    const filter = { text: sought.value.trim().toLowerCase(), unwell: unwell.checked };
    const extra = known.size ? { head: "Actions", cell: (model, one) => actions(known.get(one.name), one, reload, failed) } : undefined;
    renew(place, last.minutes ? deploymentTable(last, filter, extra) : plainModels(last, filter));
  };
  seeking.addEventListener("input", redraw);
  seeking.addEventListener("submit", (event) => event.preventDefault());
  main.append(el("div", { class: "heading" }, el("h1", {}, "Models"), add), trouble,
    section("deployments", "Models and deployments", seeking, place), prices, section("compare", "One prompt on two deployments", compare.node));

  // Settings of deployments, for admins of a gateway that can change them.
  async function reload() {
    try {
      const { data } = await json("/model/info", { quiet: true });
      known = new Map(data.filter((one) => one.model_info?.db_model !== undefined).map((one) => [one.model_info.id, one]));
      renew(prices, priceTable(data));
    } catch (error) {
      failed(error);
    }
    add.hidden = !known.size || !changesAll();
    redraw();
    refresh();
  }
  let isLoaded = false;
  let wasLost = false;
  return watch(({ status, trouble: lost }) => {
    if (lost?.status) failed(lost);
    else if (wasLost) tell(trouble, "");
    wasLost = Boolean(lost?.status);
    if (!status) return;
    last = status;
    seeking.hidden = status.models.reduce((sum, model) => sum + (model.deployments?.length ?? 1), 0) < MANY;
    compare.offer(status);
    redraw();
    if (!isLoaded && seesAll()) {
      isLoaded = true;
      reload();
    }
  });
}

function actions(known, one, reload, failed) {
  if (!known) return "–";
  const info = known.model_info;
  const act = (text, what) => el("button", { type: "button", class: "small", onclick: () => json(`/model/${encodeURIComponent(info.id)}/${what}`, { body: {} }).then(reload, failed) }, text);
  return el("span", { class: "actions" },
    changesAll() ? (one.state === "drained" ? act("Resume", "resume") : act("Drain", "drain")) : null,
    el("button", { type: "button", class: "small", onclick: () => checks(info.id) }, "Checks"),
    info.db_model && changesAll() ? el("button", { type: "button", class: "small danger", onclick: () => confirmed(`Remove ${info.id}?`, "It gets no new requests. Its running answers finish.", "Remove", () => json("/model/delete", { body: { id: info.id } }), reload) }, "Remove") : null,
    el("a", { class: "button small", href: `#/requests${query({ deployment: info.id })}` }, "Requests"));
}

// Results of the last probe, with remedies for failed checks.
function checks(id) {
  dialog(`Checks of ${id}`, () => {
    const place = el("div", {}, loading());
    json(`/model/info${query({ litellm_model_id: id })}`).then(({ data: [one] }) => {
      const rows = (one?.model_info.checks ?? []).map(({ check, result, detail, remedy }) => [
        el("code", {}, check),
        el("span", { class: { ok: "good", note: "muted" }[result] ?? "bad" }, RESULTS[result] ?? result),
        el("span", { class: "named" }, detail || "–", remedy ? el("span", { class: "remedy" }, remedy) : null),
      ]);
      place.replaceChildren(table("Checks", ["Check", "Result", "Finding, and what to do"], rows, "This deployment was not probed yet. Providers are not probed, because that costs money."));
    }, (error) => place.replaceChildren(el("p", { class: "trouble", role: "alert" }, reason(error))));
    return place;
  });
}

// Prices of the deployments whose settings have some, in dollars for a million tokens.
function priceTable(data) {
  const rows = data.flatMap((one) => {
    const price = one.unisono?.price ?? {};
    const params = { ...one.model_info, ...one.litellm_params };
    const input = price.input ?? (params.input_cost_per_token === undefined ? null : params.input_cost_per_token * 1e6);
    const output = price.output ?? (params.output_cost_per_token === undefined ? null : params.output_cost_per_token * 1e6);
    return input === null && output === null ? [] : [[one.model_name, one.model_info?.id ?? "–", dollars(input), dollars(output)]];
  });
  if (!rows.length) return "";
  return section("prices", "Prices for a million tokens", table("Prices", ["Model", "Deployment", ["Input", "n"], ["Output", "n"]], rows, ""));
}

function addForm(reload) {
  dialog("Add a deployment", (close) => {
    const text = (hint) => el("input", { type: "text", autocomplete: "off", spellcheck: "false", placeholder: hint });
    const of = { name: text("gpt-oss-120b"), model: text("vllm/openai/gpt-oss-120b"), base: text("the address of its server"), key: el("input", { type: "password", autocomplete: "off" }), input: el("input", { type: "number", min: 0, step: "any" }), output: el("input", { type: "number", min: 0, step: "any" }) };
    const trouble = complaint();
    const form = el("form", { novalidate: true },
      field("Model", of.name, "Deployments of the same model share its requests."), field("Kind and name at the server", of.model), field("Address", of.base), field("Key of the server", of.key),
      el("div", { class: "grid2" }, field("Price of a million input tokens, USD", of.input), field("Price of a million output tokens, USD", of.output)), trouble,
      el("div", { class: "row" }, el("button", { type: "submit", class: "primary" }, "Add"), el("button", { type: "button", onclick: close }, "Cancel")));
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      const params = { model: of.model.value.trim(), api_base: of.base.value.trim(), ...(of.key.value ? { api_key: of.key.value } : {}) };
      for (const name of ["input", "output"]) if (of[name].value !== "") params[`${name}_cost_per_token`] = Number(of[name].value) / 1e6;
      try {
        await json("/model/new", { body: { model_name: of.name.value.trim(), litellm_params: params } });
        close();
        reload();
      } catch (error) {
        tell(trouble, reason(error));
      }
    });
    return form;
  });
}

// Two models, or deployments of models, whose answers the playground shows side by side.
class Comparison {
  constructor() {
    this.controls = [select([], ""), select([], "")];
    this.targets = [];
    this.node = el("form", { class: "inline" }, field("First", this.controls[0]), field("Second", this.controls[1]), el("button", { type: "submit" }, "Compare in the playground"));
    this.node.addEventListener("submit", (event) => {
      event.preventDefault();
      const lanes = this.controls.map(({ value }) => this.targets[Number(value)]);
      const search = new URLSearchParams(lanes.flatMap(({ model, deployment }) => [["compare", model], ["on", deployment]]));
      location.hash = `#/playground?${search}`;
    });
  }

  offer(status) {
    const groups = status.models.filter(({ mode }) => mode === "chat");
    const targets = groups.flatMap(({ id, deployments }) => [{ model: id, deployment: "" }, ...(deployments ?? []).map(({ name }) => ({ model: id, deployment: name }))]);
    if (JSON.stringify(targets) === JSON.stringify(this.targets)) return;
    // Two deployments of one model, if there are any, otherwise two models.
    const pair = groups.find(({ deployments }) => deployments?.length > 1);
    const first = targets.flatMap((target, at) => (pair ? target.model === pair.id && target.deployment : !target.deployment) ? [at] : []);
    const chosen = this.controls.map(({ value }) => JSON.stringify(this.targets[Number(value)]));
    this.targets = targets;
    for (const [place, control] of this.controls.entries()) {
      const had = targets.findIndex((target) => JSON.stringify(target) === chosen[place]);
      const at = had < 0 ? first[Math.min(place, first.length - 1)] : had;
      control.replaceChildren(...targets.map(({ model, deployment }, value) => el("option", { value, selected: value === at }, deployment ? `${model} on ${deployment}` : model)));
    }
  }
}
