// Playground: a chat over four APIs, with settings beside it, the tokens of each answer, and a second lane to compare.

import { complaint, copier, el, field, tell } from "/page/lib/dom.js";
import { visible } from "/page/lib/invisible.js";
import { toCurl, toJavaScript, toPython } from "/page/lib/snippets.js";
import { state, watch } from "/page/lib/store.js";
import { toRequest, Unreadable } from "/page/views/asking.js";
import { chats, keepChat, newChat } from "/page/views/chats.js";
import { Lane } from "/page/views/lane.js";
import { FIRST } from "/page/views/presets.js";
import { Settings } from "/page/views/settings.js";

const LANGUAGES = { curl: ["curl", toCurl], python: ["Python", toPython], javascript: ["JavaScript", toJavaScript] };

// State of the playground, which is restored when the user returns from a different view.
let kept = null;

export function playground(main, rest, search) {
  const panel = kept ?? new Playground();
  kept = panel;
  main.append(panel.node);
  if (search.get("compare")) panel.compareTargets(search.getAll("compare"), search.getAll("on"));
  return watch(({ status }) => { if (status) panel.offer(status); });
}

class Playground {
  constructor() {
    this.chat = newChat();
    this.lanes = [];
    this.showsTokens = matchMedia("(min-width: 60rem)").matches;
    this.language = "curl";
    this.trouble = complaint();
    this.trouble.id = "asking-trouble";
    this.message = el("textarea", { rows: 2, spellcheck: "false", id: "message", placeholder: "Ask the model" });
    this.send = el("button", { type: "submit", class: "primary" }, "Send");
    this.stop = el("button", { type: "button", class: "danger", disabled: true, onclick: () => this.stopAll() }, "Stop");
    this.code = el("pre", { tabindex: "0", class: "code", "aria-label": "The request as code" });
    this.build();
    this.addLane();
    this.changed();
  }

  build() {
    const toggle = (text, pressed, act) => {
      const button = el("button", { type: "button", class: "small", "aria-pressed": String(pressed), onclick: () => {
        const next = button.getAttribute("aria-pressed") !== "true";
        button.setAttribute("aria-pressed", String(next));
        act(next);
      } }, text);
      return button;
    };
    this.tokensButton = toggle("Tokens", this.showsTokens, (on) => { this.showsTokens = on; this.lanesNode.classList.toggle("no-tokens", !on); });
    this.compareButton = toggle("Compare", false, (on) => this.compare(on));
    this.history = el("div", { class: "history" });
    this.lanesNode = el("div", { class: this.showsTokens ? "lanes" : "lanes no-tokens" });
    this.settingsNode = el("div", {});
    this.settingsTabs = el("div", { class: "segmented", role: "group", "aria-label": "Settings of", hidden: true });
    this.empty = el("div", { class: "start panel" },
      el("p", {}, "Send a message, or try an example: the model calls a tool, and its tokens appear beside the answer."),
      el("p", { class: "row" }, el("button", { type: "button", class: "primary", onclick: () => this.example() }, "Try the example"), el("span", { class: "muted" }, FIRST.message)));
    const composer = el("form", { class: "composer panel", "aria-label": "Request" },
      field("Message", this.message), this.trouble,
      el("div", { class: "row" }, this.send, this.stop, el("span", { class: "hint" }, "Ctrl+Enter sends, Esc stops")));
    composer.addEventListener("submit", (event) => { event.preventDefault(); this.ask(); });
    const codePanel = el("details", { class: "panel code-panel" }, el("summary", {}, "The same request as code"), this.codeTabs(), this.code);
    codePanel.addEventListener("toggle", () => this.drawCode());
    this.codePanel = codePanel;
    this.message.addEventListener("input", () => this.drawCode());
    const settings = el("aside", { class: "panel settings-panel", "aria-label": "Settings" },
      el("details", { open: matchMedia("(min-width: 60rem)").matches }, el("summary", {}, "Settings"), this.settingsTabs, this.settingsNode));
    this.node = el("div", {},
      el("div", { class: "heading" }, el("h1", {}, "Playground"),
        el("div", { class: "row" }, el("button", { type: "button", class: "small", onclick: () => this.open(newChat(this.lanes.map((lane) => lane.settings.read()))) }, "New chat"), this.compareButton, this.tokensButton)),
      el("div", { class: "bench" }, el("div", { class: "talk" }, this.empty, this.lanesNode, composer), el("div", { class: "beside" }, settings, codePanel, this.history)));
    this.node.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); this.ask(); }
      else if (event.key === "Escape") this.stopAll();
    });
  }

  codeTabs() {
    const tabs = el("div", { class: "row" }, Object.entries(LANGUAGES).map(([name, [text]]) => el("button", { type: "button", class: "small", "aria-pressed": String(name === this.language), onclick: (event) => {
      this.language = name;
      for (const other of tabs.querySelectorAll("[aria-pressed]")) other.setAttribute("aria-pressed", String(other === event.target));
      this.drawCode();
    } }, text)), copier("code", () => this.code.textContent));
    return tabs;
  }

  // -- lanes

  addLane(values) {
    const name = "AB"[this.lanes.length];
    const lane = new Lane(name, this);
    lane.settings = new Settings(name, values, () => { this.accept(); this.drawCode(); });
    if (state.status) lane.settings.offer(state.status);
    this.lanes.push(lane);
    this.lanesNode.append(lane.node);
    this.drawTabs();
    return lane;
  }

  compare(on) {
    if (on && this.lanes.length === 1) {
      const lane = this.addLane(this.lanes[0].settings.read());
      lane.restore(this.lanes[0].saved, this.lanes[0].settings.read().model);
    } else if (!on && this.lanes.length === 2) {
      const lane = this.lanes.pop();
      lane.stop();
      lane.node.remove();
    }
    this.drawTabs();
    this.changed();
  }

  compareTargets(models, deployments) {
    this.open(newChat());
    this.compareButton.setAttribute("aria-pressed", "true");
    this.compare(true);
    for (const [at, model] of models.slice(0, 2).entries()) this.lanes[at].settings.write({ model, deployment: deployments[at] ?? "" });
    if (state.status) this.offer(state.status);
    this.changed();
    this.message.focus();
  }

  drawTabs(active = this.lanes.length - 1) {
    const isPair = this.lanes.length > 1;
    this.lanesNode.classList.toggle("pair", isPair);
    this.settingsTabs.hidden = !isPair;
    this.settingsTabs.replaceChildren(...this.lanes.map((lane, at) => el("button", { type: "button", class: "small", "aria-pressed": String(at === active), onclick: () => { this.drawTabs(at); this.settingsTabs.children[at].focus(); } }, `Lane ${lane.name}`)));
    this.settingsNode.replaceChildren(this.lanes[active].settings.node);
    for (const lane of this.lanes) lane.title.hidden = !isPair;
  }

  settings(lane) {
    return lane.settings.read();
  }

  offer(status) {
    for (const lane of this.lanes) lane.settings.offer(status);
    this.drawCode();
  }

  // -- sending

  example() {
    for (const lane of this.lanes) lane.settings.write(FIRST.values);
    this.message.value = FIRST.message;
    this.ask();
  }

  ask() {
    if (this.lanes.some((lane) => lane.running)) return;
    const text = this.message.value;
    const open = this.lanes.some((lane) => lane.open.length);
    if (!text && !open) {
      tell(this.trouble, "Write a message first.");
      this.message.focus();
      return;
    }
    this.accept();
    for (const lane of this.lanes) {
      try {
        toRequest(lane.settings.read(), [{ kind: "user", text }]);
      } catch (error) {
        this.failed(error, lane);
        return;
      }
      // If there is no model, the gateway has not answered yet, or the key may not use any model.
      if (!lane.settings.read().model) {
        tell(this.trouble, lane.settings.absent.textContent || "The models are not known yet. Try again in a moment.");
        return;
      }
    }
    this.message.value = "";
    for (const lane of this.lanes) {
      if (text) lane.add({ kind: "user", text });
      lane.send();
    }
  }

  // Continues the request when all approvals of the answer are decided.
  decided(lane) {
    if (!lane.open.some(({ turn }) => turn.kind === "approval") && !lane.running) lane.send();
  }

  stopAll() {
    for (const lane of this.lanes) lane.stop();
  }

  failed(error, lane) {
    tell(this.trouble, error.message);
    if (!(error instanceof Unreadable)) return;
    this.drawTabs(this.lanes.indexOf(lane));
    lane.settings.fail(error.field, this.trouble.id);
  }

  accept() {
    tell(this.trouble, "");
    for (const lane of this.lanes) lane.settings.acceptAll();
  }

  // Called by lanes when a turn is added or ends.
  changed() {
    const busy = this.lanes.some((lane) => lane.running);
    const [off, on] = busy ? [this.send, this.stop] : [this.stop, this.send];
    // Moves the focus from a disabled button to the enabled button. *Regenerate* removes its own button, so that the
    // page loses the focus.
    const stood = document.activeElement === off || (busy && document.activeElement === document.body);
    on.disabled = false;
    if (stood) on.focus({ preventScroll: true });
    off.disabled = true;
    this.node.classList.toggle("is-busy", busy);
    this.empty.hidden = this.lanes.some((lane) => lane.turns.length);
    for (const lane of this.lanes) lane.title.replaceChildren(visible(`${lane.name}: ${lane.settings.target}`));
    if (!busy && this.lanes.some((lane) => lane.turns.length)) {
      this.chat.lanes = this.lanes.map((lane) => ({ settings: lane.settings.read(), turns: lane.saved }));
      keepChat(this.chat);
    }
    this.drawHistory();
    this.drawCode();
  }

  // -- the request as code

  drawCode() {
    if (!this.codePanel.open) return;
    const lane = this.lanes[0];
    const text = this.message.value;
    const turns = [...lane.turns.map(({ turn }) => turn), ...(text || !lane.turns.length ? [{ kind: "user", text }] : [])];
    try {
      this.code.textContent = LANGUAGES[this.language][1](toRequest(lane.settings.read(), turns), Boolean(state.status?.keyless));
    } catch (error) {
      this.code.textContent = `# ${error.message}`;
    }
  }

  // -- history

  open(chat) {
    this.stopAll();
    this.chat = chat;
    for (const lane of this.lanes.splice(0)) lane.node.remove();
    for (const one of chat.lanes.length ? chat.lanes : [{}]) this.addLane(one.settings).restore(one.turns ?? [], one.settings?.model ?? "");
    this.compareButton.setAttribute("aria-pressed", String(this.lanes.length > 1));
    this.drawTabs(0);
    this.changed();
  }

  fork(lane, at) {
    const { settings } = lane;
    const turns = lane.saved.slice(0, at);
    this.open({ ...newChat([settings.read()]), lanes: [{ settings: settings.read(), turns }] });
    this.message.focus();
  }

  drawHistory() {
    const all = chats();
    this.history.replaceChildren(...(all.length ? [
      el("h2", {}, "Chats of this tab"),
      el("ul", { class: "plain" }, all.map((chat) => el("li", {}, el("button", { type: "button", class: "link", "aria-current": chat.id === this.chat.id ? "true" : null, onclick: () => { this.open(chat); this.history.querySelector("[aria-current]")?.focus(); } }, chat.title)))),
    ] : []));
  }
}
