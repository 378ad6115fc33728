// Settings of one lane of the playground: API, model, system prompt, sampling, tools, response format.

import { el, field, select } from "/page/lib/dom.js";
import { visible } from "/page/lib/invisible.js";
import { APIS, toolNames } from "/page/views/asking.js";
import { PRESETS, SCHEMA_EXAMPLES, TOOL_EXAMPLES } from "/page/views/presets.js";

const number = (given) => el("input", { type: "number", inputmode: "decimal", ...given });
const area = (rows, mono) => el("textarea", { rows, class: mono ? "mono" : undefined, spellcheck: "false" });

export class Settings {
  // `changed` is called after every change by the user.
  constructor(name, values, changed) {
    this.name = name;
    this.changed = changed;
    this.fields = {
      surface: select(Object.entries(APIS), "chat"), model: el("select", {}), deployment: select([["", "any"]], ""), preset: select([["", "choose …"], ...Object.entries(PRESETS).map(([value, { title }]) => [value, title])], ""),
      system: area(3), effort: select([["", "default"], ["low", "low"], ["medium", "medium"], ["high", "high"]], ""),
      temperature: number({ min: 0, max: 2, step: 0.1, placeholder: "1" }), topP: number({ min: 0, max: 1, step: 0.05, placeholder: "1" }),
      most: number({ min: 1, step: 1, placeholder: "no limit" }), seed: number({ step: 1, placeholder: "random" }),
      frequency: number({ min: -2, max: 2, step: 0.1, placeholder: "0" }), presence: number({ min: -2, max: 2, step: 0.1, placeholder: "0" }),
      stop: area(2, true), stream: el("input", { type: "checkbox", checked: true }),
      tools: area(6, true), choice: select([["auto", "auto"]], "auto"), oneCall: el("input", { type: "checkbox" }),
      servers: area(2, true), approval: select([["always", "always"], ["never", "never"]], "always"),
      format: select([["text", "text"], ["json_object", "JSON"], ["json_schema", "JSON schema"]], "text"), schema: area(6, true), more: area(3, true),
    };
    this.fields.schema.value = JSON.stringify(SCHEMA_EXAMPLES.answer.schema, null, 2);
    this.node = this.build();
    this.write(values ?? {});
    this.node.addEventListener("input", (event) => {
      this.accept(event.target);
      if (event.target === this.fields.deployment) this.wantedDeployment = event.target.value;
      if (event.target === this.fields.model) this.offerDeployments();
      if (event.target === this.fields.preset) this.write(PRESETS[event.target.value]?.values ?? {});
      this.drawn();
      changed();
    });
    this.drawn();
  }

  build() {
    const of = this.fields;
    const examples = (all, fill) => el("span", { class: "row" }, el("span", { class: "hint" }, "Examples:"), Object.values(all).map((one) =>
      el("button", { type: "button", class: "small", onclick: () => { fill(one); this.drawn(); this.changed(); } }, one.title)));
    const checked = (control, text) => el("label", { class: "check" }, control, ` ${text}`);
    const group = (title, ...children) => el("details", {}, el("summary", {}, title), el("div", { class: "stack" }, children));
    this.schemaField = el("div", { class: "stack" }, field("Schema", of.schema), examples(SCHEMA_EXAMPLES, ({ schema }) => { of.schema.value = JSON.stringify(schema, null, 2); this.accept(of.schema); }));
    this.absent = el("p", { class: "trouble", hidden: true });
    this.deploymentField = field("Deployment", of.deployment);
    return el("div", { class: "stack settings" },
      field("API", of.surface), field("Model", of.model), this.absent, this.deploymentField,
      field("System message", of.system),
      el("div", { class: "grid2" }, field("Preset", of.preset), field("Reasoning effort", of.effort), field("Temperature", of.temperature), field("Max tokens", of.most)),
      checked(of.stream, "Stream"),
      group("Tools", field("Tools, as JSON", of.tools), examples(TOOL_EXAMPLES, ({ tools }) => { of.tools.value = JSON.stringify(tools, null, 2); this.accept(of.tools); }),
        field("Tool choice", of.choice), checked(of.oneCall, "One call at a time")),
      group("MCP servers", field("Servers, one per line", of.servers, "A label of the configuration, or a label and a URL. Only for Responses; in Chat Completions, any entry enables the tools of the configured servers."), field("Approval", of.approval)),
      group("Response format", field("Response format", of.format), this.schemaField),
      group("More parameters", el("div", { class: "grid2" }, field("Top p", of.topP), field("Seed", of.seed), field("Frequency penalty", of.frequency), field("Presence penalty", of.presence)),
        field("Stop strings, one per line", of.stop), field("Further fields, as JSON", of.more, "Merged into the body of the request.")));
  }

  read() {
    const values = Object.fromEntries(Object.entries(this.fields).map(([name, one]) => [name, one.type === "checkbox" ? one.checked : one.value]));
    // The options are not known before the first status.
    return { ...values, model: this.fields.model.value || this.wanted || "", deployment: this.members ? this.fields.deployment.value : this.wantedDeployment ?? "" };
  }

  get target() {
    const { model, deployment } = this.read();
    return deployment ? `${model} on ${deployment}` : model;
  }

  write(values) {
    for (const [name, value] of Object.entries(values)) {
      const one = this.fields[name];
      if (!one || name === "preset") continue;
      if (name === "model") this.wanted = value;
      if (name === "deployment") this.wantedDeployment = value;
      if (one.type === "checkbox") one.checked = value;
      else one.value = value;
      this.accept(one);
    }
    // A tool choice exists only after its tool.
    this.drawn(values.choice);
  }

  // Offers the models that the key may use.
  offer(status) {
    const models = status.models.filter(({ mode }) => mode === "chat");
    const of = this.fields.model;
    const names = models.map(({ id }) => id);
    if (names.join("\n") !== [...of.options].map(({ value }) => value).join("\n")) {
      const chosen = of.value || this.wanted;
      of.replaceChildren(...names.map((id) => el("option", { value: id, selected: id === chosen }, id)));
      this.entitle();
    }
    this.members = new Map(models.map(({ id, deployments }) => [id, (deployments ?? []).map((one) => one.name)]));
    this.offerDeployments();
    this.absent.hidden = models.length > 0;
    this.absent.textContent = models.length ? "" : "This key has no access to a model that generates text.";
  }

  // The operator may select one of the deployments of the model.
  offerDeployments() {
    const of = this.fields.deployment;
    const names = this.members?.get(this.fields.model.value) ?? [];
    this.deploymentField.hidden = names.length === 0;
    if (["", ...names].join("\n") === [...of.options].map(({ value }) => value).join("\n")) return;
    const chosen = this.wantedDeployment;
    of.replaceChildren(el("option", { value: "" }, "any"), ...names.map((name) => el("option", { value: name, selected: name === chosen }, name)));
  }

  drawn(choice) {
    const of = this.fields;
    this.schemaField.hidden = of.format.value !== "json_schema";
    const names = ["auto", "none", "required", ...toolNames(of.tools.value)];
    if (names.join("\n") !== [...of.choice.options].map((option) => option.value).join("\n")) {
      const chosen = choice ?? of.choice.value;
      of.choice.replaceChildren(...names.map((name) => el("option", { value: name, selected: name === chosen }, name)));
    } else if (choice) of.choice.value = choice;
    this.entitle();
  }

  // The field truncates a long name, so its title is the whole name.
  entitle() {
    this.fields.model.setAttribute("title", visible(this.fields.model.value).textContent);
  }

  fail(name, id) {
    const one = this.fields[name];
    one.setAttribute("aria-invalid", "true");
    one.setAttribute("aria-errormessage", id);
    for (let parent = one.closest("details"); parent; parent = parent.parentElement.closest("details")) parent.open = true;
    one.focus();
  }

  accept(one) {
    one.removeAttribute("aria-invalid");
    one.removeAttribute("aria-errormessage");
  }

  acceptAll() {
    for (const one of Object.values(this.fields)) this.accept(one);
  }
}
