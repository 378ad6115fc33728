// Models: deployments with their checks, draining, adding and removing, prices, and a comparison of two models.

import { json, query, reason } from "/page/lib/api.js";
import { complaint, dialog, el, field, loading, section, select, table, tell } from "/page/lib/dom.js";
import { dollars } from "/page/lib/format.js";
import { renew } from "/page/lib/renew.js";
import { changesAll, refresh, seesAll, watch } from "/page/lib/store.js";
import { deploymentTable, plainModels } from "/page/views/deployments.js";

const MANY = 12;

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
    const extra = known.size && changesAll() ? { head: "Actions", cell: (model, one) => actions(known.get(one.name), one, reload, failed) } : undefined;
    renew(place, last.minutes ? deploymentTable(last, filter, extra) : plainModels(last, filter));
  };
  seeking.addEventListener("input", redraw);
  seeking.addEventListener("submit", (event) => event.preventDefault());
  main.append(el("div", { class: "heading" }, el("h1", {}, "Models"), add), trouble,
    section("deployments", "Models and deployments", seeking, place), prices, section("compare", "Compare two models", compare.node));

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
  const act = (text, path, body, kind) => el("button", { type: "button", class: `small ${kind ?? ""}`, onclick: () => json(path, { body }).then(reload, failed) }, text);
  const path = (what) => `/model/${encodeURIComponent(info.id)}/${what}`;
  return el("span", { class: "actions" },
    one.state === "drained" ? act("Resume", path("resume"), {}) : act("Drain", path("drain"), {}),
    info.db_model ? el("button", { type: "button", class: "small danger", onclick: () => remove(info.id, reload) }, "Remove") : null,
    el("a", { class: "button small", href: `#/requests${query({ deployment: info.id })}` }, "Requests"));
}

function remove(id, reload) {
  dialog(`Remove ${id}?`, (close) => {
    const trouble = complaint();
    return [el("p", {}, "It gets no new requests. Its running answers finish."), trouble, el("div", { class: "row" },
      el("button", { type: "button", class: "danger", onclick: () => json("/model/delete", { body: { id } }).then(() => { close(); reload(); }, (error) => tell(trouble, reason(error))) }, "Remove"),
      el("button", { type: "button", onclick: close }, "Cancel"))];
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

class Comparison {
  constructor() {
    this.one = select([], "");
    this.other = select([], "");
    this.node = el("form", { class: "inline" }, field("First model", this.one), field("Second model", this.other), el("button", { type: "submit" }, "Compare in the playground"));
    this.node.addEventListener("submit", (event) => {
      event.preventDefault();
      location.hash = `#/playground?compare=${[this.one, this.other].map(({ value }) => encodeURIComponent(value)).join(",")}`;
    });
  }

  offer(status) {
    const names = status.models.filter(({ mode }) => mode === "chat").map(({ id }) => id);
    if (names.join("\n") === [...this.one.options].map(({ value }) => value).join("\n")) return;
    for (const [place, control] of [this.one, this.other].entries()) {
      const chosen = control.value || names[Math.min(place, names.length - 1)];
      control.replaceChildren(...names.map((id) => el("option", { value: id, selected: id === chosen }, id)));
    }
  }
}
