// Dialogs that create and change keys and teams.

import { json, reason } from "/page/lib/api.js";
import { complaint, dialog, el, field, tell } from "/page/lib/dom.js";
import { changesAll, state } from "/page/lib/store.js";
import { secret } from "/page/views/keys.js";

const text = (value, hint, more) => el("input", { type: "text", autocomplete: "off", spellcheck: "false", placeholder: hint, value: value ?? "", ...more });
const amount = (value, hint) => el("input", { type: "number", min: 0, step: "any", inputmode: "decimal", placeholder: hint ?? "no limit", value: value ?? "" });
const list = (value) => value.split(",").map((one) => one.trim()).filter(Boolean);
const numberOf = (control) => (control.value === "" ? null : Number(control.value));

// Check boxes for the models; none checked means all.
function modelChoice(chosen) {
  const names = [...new Set([...(state.status?.models ?? []).map((model) => model.id), ...(chosen ?? [])])];
  const boxes = names.map((name) => {
    const box = el("input", { type: "checkbox", value: name, checked: (chosen ?? []).includes(name) });
    return { box, node: el("label", { class: "check" }, box, ` ${name}`) };
  });
  return {
    node: el("fieldset", {}, el("legend", {}, "Models"), el("div", { class: "row choices" }, boxes.map(({ node }) => node)), el("span", { class: "hint" }, "If none is checked, all models are permitted.")),
    read: () => boxes.filter(({ box }) => box.checked).map(({ box }) => box.value),
  };
}

function limitFields(one) {
  const of = {
    max_budget: amount(one?.max_budget), soft_budget: amount(one?.soft_budget, "no alert"), budget_duration: text(one?.budget_duration, "never renews"), token_budget: amount(one?.token_budget),
    rpm_limit: amount(one?.rpm_limit), tpm_limit: amount(one?.tpm_limit), max_parallel_requests: amount(one?.max_parallel_requests),
  };
  return {
    node: el("div", { class: "grid2" },
      field("Budget, USD", of.max_budget), field("Soft budget, USD", of.soft_budget, "Sends an alert, but refuses no request"), field("Budget renews every", of.budget_duration, "12h, 30d, 1mo, day, month"),
      field("Token budget", of.token_budget), field("Requests per minute", of.rpm_limit),
      field("Tokens per minute", of.tpm_limit), field("Concurrent requests", of.max_parallel_requests)),
    read: () => ({
      max_budget: numberOf(of.max_budget), soft_budget: numberOf(of.soft_budget), budget_duration: of.budget_duration.value.trim() || null, token_budget: numberOf(of.token_budget),
      rpm_limit: numberOf(of.rpm_limit), tpm_limit: numberOf(of.tpm_limit), max_parallel_requests: numberOf(of.max_parallel_requests),
    }),
  };
}

// Returns the values that differ from `before`; for a new object, those that are set. Only these are sent.
function changed(values, before) {
  const same = (name, value) => JSON.stringify(before?.[name] ?? (Array.isArray(value) ? [] : null)) === JSON.stringify(value);
  return Object.fromEntries(Object.entries(values).filter(([name, value]) => !same(name, value)));
}

export function keyForm(key, reload) {
  dialog(key ? `Edit ${key.key_alias ?? key.token}` : "Create a key", (close) => {
    const of = { alias: text(key?.key_alias, "nightly"), team: text(null, "none"), user: text(null, "none"), expires: text(null, key ? "unchanged" : "never"), tags: text((key?.tags ?? []).join(", "), "none") };
    const models = modelChoice(key?.models);
    const limits = limitFields(key);
    const raw = el("input", { type: "checkbox", checked: key?.raw });
    const trouble = complaint();
    const form = el("form", { novalidate: true },
      field("Name", of.alias),
      key ? null : el("div", { class: "grid2" }, field("Team", of.team), field("User", of.user)),
      models.node, limits.node,
      el("div", { class: "grid2" }, field(key ? "New time until it expires" : "Expires after", of.expires, "12h, 90d; -1 for never"), field("Tags", of.tags, "separated by commas")),
      changesAll() ? el("label", { class: "check" }, raw, " Permit raw completions") : null,
      trouble,
      el("div", { class: "row" }, el("button", { type: "submit", class: "primary" }, key ? "Save" : "Create"), el("button", { type: "button", onclick: close }, "Cancel")));
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      const values = { key_alias: of.alias.value.trim() || null, models: models.read(), ...limits.read(), tags: list(of.tags.value), raw: raw.checked || (key?.raw === undefined ? null : false) };
      const body = changed(values, key);
      if (of.expires.value.trim()) body.duration = of.expires.value.trim();
      if (!key && of.team.value.trim()) body.team_id = of.team.value.trim();
      if (!key && of.user.value.trim()) body.user_id = of.user.value.trim();
      try {
        const made = await json(key ? "/key/update" : "/key/generate", { body: key ? { key: key.token, ...body } : body });
        reload();
        if (key) close();
        else form.replaceWith(el("div", { class: "stack" }, secret(made, close)));
      } catch (error) {
        tell(trouble, reason(error));
      }
    });
    return form;
  });
}

export function teamForm(team, reload) {
  dialog(team ? `Edit ${team.team_alias ?? team.team_id}` : "Create a team", (close) => {
    const alias = text(team?.team_alias, "search");
    const id = text(team?.team_id, "generated", { disabled: Boolean(team) });
    const models = modelChoice(team?.models);
    const limits = limitFields(team);
    const trouble = complaint();
    const form = el("form", { novalidate: true }, el("div", { class: "grid2" }, field("Name", alias), field("Id", id)), models.node, limits.node, trouble,
      el("div", { class: "row" }, el("button", { type: "submit", class: "primary" }, team ? "Save" : "Create"), el("button", { type: "button", onclick: close }, "Cancel")));
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      const body = changed({ team_alias: alias.value.trim() || null, models: models.read(), ...limits.read() }, team);
      if (team || id.value.trim()) body.team_id = team?.team_id ?? id.value.trim();
      try {
        await json(team ? "/team/update" : "/team/new", { body });
        reload();
        close();
      } catch (error) {
        tell(trouble, reason(error));
      }
    });
    return form;
  });
}
