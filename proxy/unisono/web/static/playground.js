// Playground: Chat Completions and Responses, with all options that change an answer.

import { asked, events, json, reason } from "/page/api.js";
import { chatAnswer, chatEvent, responsesAnswer, responsesEvent } from "/page/answering.js";
import { toolNames, toRequest, Unreadable } from "/page/asking.js";
import { toCurl, toPython } from "/page/code.js";
import { complaint, copier, el, field, say, select, shown, tell } from "/page/dom.js";
import example from "/page/example.js";
import { Transcript } from "/page/transcript.js";

const SCHEMA = `{
  "type": "object",
  "properties": {"answer": {"type": "string"}},
  "required": ["answer"],
  "additionalProperties": false
}`;
// Maximum characters of a complete answer that screen readers read out.
const MOST_SAID = 300;
const ROLES = [["user", "User"], ["assistant", "Assistant"]];
const STREAMED = { chat: chatEvent, responses: responsesEvent };
const WHOLE = { chat: chatAnswer, responses: responsesAnswer };

// Restores the state on return from another view.
let kept = null;

export function playground(main) {
  const panel = kept ?? new Playground();
  kept = panel;
  main.append(panel.node);
  panel.load();
  return () => {};
}

class Playground {
  constructor() {
    this.rules = {};
    this.traces = "off";
    this.keyless = false;
    this.running = null;
    this.fields = this.makeFields();
    this.messages = el("div", { class: "messages" });
    this.addMessage({ role: "user", content: "" });
    this.answers = el("div", { class: "answers" });
    this.trouble = complaint();
    this.trouble.id = "asking-trouble";
    this.absent = complaint();
    this.send = el("button", { type: "submit", class: "primary" }, "Send");
    this.stop = el("button", { type: "button", disabled: true, onclick: () => this.running?.abort() }, "Stop");
    this.code = el("pre", { tabindex: "0", class: "code", "aria-label": "The request as code" });
    this.language = "curl";
    this.node = this.makeNode();
    this.node.addEventListener("input", (event) => {
      this.accept([event.target]);
      this.changed();
    });
    this.changed();
  }

  makeFields() {
    const number = (given) => el("input", { type: "number", inputmode: "decimal", ...given });
    return {
      surface: select([["chat", "Chat Completions"], ["responses", "Responses"]], "chat"),
      model: el("select", {}),
      system: el("textarea", { rows: 2, spellcheck: "false" }),
      effort: select([["", "default"], ["low", "low"], ["medium", "medium"], ["high", "high"]], ""),
      temperature: number({ min: 0, max: 2, step: 0.1, placeholder: "1" }),
      most: number({ min: 1, step: 1, placeholder: "no limit" }),
      stream: el("input", { type: "checkbox", checked: true }),
      tools: el("textarea", { rows: 5, class: "mono", spellcheck: "false" }),
      choice: select([["auto", "auto"]], "auto"),
      format: select([["text", "text"], ["json_object", "JSON"], ["json_schema", "JSON schema"]], "text"),
      schema: el("textarea", { rows: 5, class: "mono", spellcheck: "false" }, SCHEMA),
    };
  }

  makeNode() {
    const of = this.fields;
    const tryTool = el("button", { type: "button", class: "small", onclick: () => this.fillInExample() }, "Example tool");
    this.schemaField = field("Schema", of.schema);
    this.more = el("button", { type: "button", class: "small", onclick: () => this.addMessage({ role: "user", content: "" }, true) }, "Add a message");
    const form = el(
      "form",
      { class: "asking", "aria-label": "Request", novalidate: true },
      el("div", { class: "pair" }, field("API", of.surface), field("Model", of.model)), this.absent,
      field("System message", of.system),
      el("fieldset", {}, el("legend", {}, "Messages"), this.messages,
        this.more),
      el("div", { class: "triple" }, field("Reasoning effort", of.effort), field("Temperature", of.temperature), field("Max tokens", of.most)),
      el("details", {}, el("summary", {}, "Tools and response format"),
        field("Tools, as JSON", of.tools), tryTool,
        el("div", { class: "pair" }, field("Tool choice", of.choice), field("Response format", of.format)), this.schemaField),
      el("div", { class: "row send" }, this.send, this.stop, el("label", { class: "check" }, of.stream, " Stream"),
        el("span", { class: "hint" }, "Ctrl+Enter sends")),
      this.trouble,
      el("details", {}, el("summary", {}, "The same request as code"), this.codeTabs(), this.code),
    );
    form.addEventListener("submit", (event) => { event.preventDefault(); this.ask(); });
    form.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); this.ask(); }
    });
    this.empty = el("p", { class: "empty" }, "Answers appear here, with reasoning, tool calls, text and recoveries in separate parts.");
    this.answers.append(this.empty);
    const right = el("section", { class: "answering", "aria-label": "Answers" }, this.answers);
    return el("div", {}, el("h1", {}, "Playground"), el("div", { class: "bench" }, form, right));
  }

  // Keeps a message that the user has written.
  fillInExample() {
    const [first] = this.messages.querySelectorAll(".message textarea");
    if (first && !first.value) first.value = example.message;
    this.fields.tools.value = JSON.stringify([example.tool], null, 2);
    this.accept([this.fields.tools]);
    this.changed();
  }

  codeTabs() {
    const tab = (name, text) => {
      const button = el("button", { type: "button", class: "small", "aria-pressed": String(name === this.language) }, text);
      button.addEventListener("click", () => {
        this.language = name;
        for (const other of tabs.querySelectorAll("[aria-pressed]")) other.setAttribute("aria-pressed", String(other === button));
        this.changed();
      });
      return button;
    };
    const tabs = el("div", { class: "row" }, tab("curl", "curl"), tab("python", "Python SDK"), copier("code", () => this.code.textContent));
    return tabs;
  }

  addMessage(message, focus) {
    // A tool result is valid only if there was a call.
    const role = select(message.callId ? [["tool", "Tool result"]] : ROLES, message.role);
    const content = el("textarea", { rows: message.role === "user" ? 3 : 2, spellcheck: "false" });
    content.value = message.content ?? "";
    const calls = message.calls?.length ? el("p", { class: "note" }, `calls ${message.calls.map((call) => call.name).join(", ")}`) : null;
    const id = message.callId ? el("p", { class: "note" }, `result of ${message.called}`) : null;
    const gone = el("button", { type: "button", class: "small quiet" }, "Remove");
    const node = el("div", { class: "message" }, el("div", { class: "row" }, role, gone), calls, id, content);
    node.read = () => ({ ...message, role: role.value, content: content.value });
    node.count = (place) => {
      role.setAttribute("aria-label", `Role of message ${place}`);
      content.setAttribute("aria-label", `Text of message ${place}`);
      gone.setAttribute("aria-label", `Remove message ${place}`);
    };
    gone.addEventListener("click", () => {
      const next = node.nextElementSibling ?? node.previousElementSibling;
      node.remove();
      (next?.querySelector("textarea") ?? this.more).focus();
      this.changed();
    });
    this.messages.append(node);
    if (focus) content.focus();
    if (this.node) this.changed();
  }

  async load() {
    try {
      const status = await json("/v1/status");
      this.rules = status.rules;
      this.traces = status.traces;
      this.keyless = status.keyless;
      const chosen = this.fields.model.value;
      const models = status.models.filter(({ mode }) => mode === "chat");
      this.fields.model.replaceChildren(...models.map(({ id }) => el("option", { value: id, selected: id === chosen }, id)));
      this.changed();
      tell(this.absent, models.length ? "" : "This key has no access to a model that generates text.");
    } catch (error) {
      tell(this.absent, reason(error));
    }
    return this.absent.hidden;
  }

  get given() {
    const values = Object.fromEntries(Object.entries(this.fields).map(([name, one]) => [name, one.value]));
    return { ...values, stream: this.fields.stream.checked, messages: [...this.messages.children].map((node) => node.read()) };
  }

  changed() {
    const of = this.fields;
    this.schemaField.hidden = of.format.value !== "json_schema";
    const names = ["auto", "none", "required", ...toolNames(of.tools.value)];
    if (names.join("\n") !== [...of.choice.options].map((option) => option.value).join("\n")) {
      const chosen = of.choice.value;
      of.choice.replaceChildren(...names.map((name) => el("option", { value: name, selected: name === chosen }, name)));
    }
    of.model.title = of.model.selectedOptions[0]?.textContent ?? "";
    for (const [at, node] of [...this.messages.children].entries()) node.count(at + 1);
    try {
      const { path, body } = toRequest(this.given);
      this.code.textContent = (this.language === "curl" ? toCurl : toPython)(path, body, this.keyless);
    } catch (error) {
      this.code.textContent = `# ${error.message}`;
    }
  }

  fail(message, name) {
    tell(this.trouble, message);
    if (name) {
      this.fields[name].setAttribute("aria-invalid", "true");
      this.fields[name].setAttribute("aria-errormessage", this.trouble.id);
      this.fields[name].closest("details")?.setAttribute("open", "");
      this.fields[name].focus();
    }
  }

  // Field errors are cleared when the fields change or are sent again.
  accept(fields) {
    for (const one of fields) {
      one.removeAttribute("aria-invalid");
      one.removeAttribute("aria-errormessage");
    }
  }

  isRecorded(unisono) {
    const mended = (unisono?.recoveries ?? []).some((rule) => rule !== "restored-stop");
    return this.traces === "all" || (this.traces === "recoveries" && (mended || unisono?.failovers || unisono?.unmet));
  }

  async ask() {
    if (this.running) return;
    tell(this.trouble, "");
    this.accept(Object.values(this.fields));
    let given;
    let request;
    try {
      toRequest(this.given);
      // Models that could not be loaded before may be available now.
      if (!this.fields.model.value && (!(await this.load()) || this.running)) return;
      given = this.given;
      request = toRequest(given);
    } catch (error) {
      this.fail(error.message, error instanceof Unreadable ? error.field : undefined);
      return;
    }
    const running = new AbortController();
    this.running = running;
    this.sending(true);
    const transcript = new Transcript(this.rules, (unisono) => this.isRecorded(unisono), titleOf(given));
    this.empty.remove();
    this.answers.prepend(transcript.node);
    shown(transcript.node);
    say("The answer is being generated");
    let trouble = "";
    let requestId = "";
    try {
      const answer = await asked(request.path, { body: request.body, signal: running.signal });
      requestId = answer.headers.get("x-request-id");
      if (given.stream) {
        for await (const event of events(answer)) STREAMED[given.surface](event, transcript);
        if (!transcript.known.finish) throw new Error("The connection was lost during the stream.");
      } else {
        WHOLE[given.surface](await answer.json(), transcript);
      }
    } catch (error) {
      trouble = running.signal.aborted ? "Stopped." : reason(error);
    }
    transcript.ended(trouble, requestId);
    if (!trouble) transcript.next.append(this.goOn(transcript, given.messages));
    // Errors have an alert of their own.
    say(trouble ? "" : `The answer is complete. ${transcript.message.content.slice(0, MOST_SAID)}`);
    this.running = null;
    this.sending(false);
  }

  // Moves the focus from a disabled button to the enabled one.
  sending(busy) {
    const [off, on] = busy ? [this.send, this.stop] : [this.stop, this.send];
    const stood = document.activeElement === off;
    on.disabled = false;
    if (stood) on.focus({ preventScroll: true });
    off.disabled = true;
  }

  // The conversation up to this answer, independent of the current field values.
  goOn(transcript, messages) {
    const button = el("button", { type: "button", class: "small" }, "Continue from here");
    button.addEventListener("click", () => {
      const { message } = transcript;
      this.messages.replaceChildren();
      for (const one of messages) this.addMessage(one);
      this.addMessage(message);
      for (const call of message.calls) this.addMessage({ role: "tool", content: "", callId: call.id, called: call.name });
      if (message.calls.length) this.messages.querySelectorAll(".message textarea")[messages.length + 1].focus();
      else this.addMessage({ role: "user", content: "" }, true);
    });
    return button;
  }
}

function titleOf({ model, messages }) {
  const last = messages.at(-1)?.content.trim().replaceAll(/\s+/g, " ") ?? "";
  return last ? `${model}: ${last.length > 90 ? `${last.slice(0, 90)}…` : last}` : model;
}
