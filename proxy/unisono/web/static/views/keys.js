// Keys, teams, spend and audit records, as far as the role of the key permits.

import { json, query, reason } from "/page/lib/api.js";
import { confirmed } from "/page/lib/confirm.js";
import { complaint, copier, dialog, el, empty, loading, shown, svg, table, tell } from "/page/lib/dom.js";
import { dollars, moment, number } from "/page/lib/format.js";
import { changesAll, role, seesAll, state, watch } from "/page/lib/store.js";
import { keyForm, teamForm } from "/page/views/keyforms.js";
import { spend } from "/page/views/spend.js";

const PAGE = 50;
const TABS = {
  keys: { title: "Keys", show: keyList, for: () => true },
  teams: { title: "Teams", show: teamList, for: () => ["master", "admin", "viewer", "team_admin", "user"].includes(role()) },
  spend: { title: "Spend", show: spend, for: () => true },
  audit: { title: "Audit", show: auditList, for: seesAll },
};

export function keys(main, rest, search) {
  const place = el("div");
  main.append(el("h1", {}, "Keys"), place);
  let left = () => {};
  let drawn = "";
  const unwatch = watch(({ status }) => {
    // The tabs depend on the role, which is part of the status.
    if (!status || drawn === status.role) return;
    drawn = status.role;
    left();
    left = show(place, rest, search) ?? (() => {});
  });
  return () => { left(); unwatch(); };
}

function show(place, rest, search) {
  const tabs = Object.entries(TABS).filter(([, tab]) => tab.for());
  const [name, tab] = tabs.find(([one]) => one === rest) ?? tabs[0];
  const content = el("div", {}, loading());
  place.replaceChildren(
    el("nav", { class: "tabs", "aria-label": "Parts" }, tabs.map(([one, { title }]) => el("a", { href: `#/keys/${one}`, "aria-current": one === name ? "page" : null }, title))),
    content);
  if (state.status.keyless && name !== "spend") {
    content.replaceChildren(empty("This gateway needs no keys, so there are none. Set ", el("code", {}, "general_settings.master_key"), " and a store, then sign in with the master key to create keys and teams."));
    return null;
  }
  return tab.show(content, search);
}

// The spend of the current budget period, as a bar if there is a budget. A mark on the bar is the soft budget.
function budget({ spend: spent = 0, max_budget: most, soft_budget: soft, budget_reset_at: renews }) {
  if (!most && !soft) return dollars(spent);
  const whole = most || soft;
  const crossed = Boolean(soft) && spent >= soft;
  const words = [`${Math.round((100 * spent) / whole)} % of the ${most ? "budget" : "soft budget"}`, most && soft ? `soft budget at ${Math.round((100 * soft) / most)} %` : ""].filter(Boolean).join(", ");
  return el("span", { class: "budget" },
    el("span", { class: "budget-bar" },
      el("meter", { min: 0, max: 1, value: Math.min(spent / whole, 1), high: 0.9, low: 0.75, optimum: 0, "aria-label": words }),
      most && soft && soft < most ? svg("svg", { viewBox: "0 0 100 10", preserveAspectRatio: "none", "aria-hidden": "true" }, svg("rect", { x: (100 * soft) / most - 1, y: 0, width: 2, height: 10 })) : null),
    el("span", {}, most ? `${dollars(spent)} of ${dollars(most)}` : dollars(spent)),
    soft ? el("span", { class: crossed ? "warn" : "muted" }, `soft budget ${dollars(soft)}${crossed ? ", crossed" : ""}`) : null,
    renews ? el("span", { class: "muted" }, `renews ${moment(Date.parse(renews) / 1000).slice(0, 10)}`) : null);
}

function limits(one) {
  const parts = [
    one.rpm_limit && `${number(one.rpm_limit)} requests/min`,
    one.tpm_limit && `${number(one.tpm_limit)} tokens/min`,
    one.max_parallel_requests && `${number(one.max_parallel_requests)} at once`,
    one.token_budget && `${number(one.token_budget)} tokens${one.budget_duration ? ` per ${one.budget_duration}` : ""}`,
  ].filter(Boolean);
  return parts.length ? parts.join(", ") : "–";
}

// A list that is read again after each change. `load` is called with the page number and returns the `content`, the
// number of `pages`, and `words` about the pages.
function listing(place, head, [before, behind], load) {
  const trouble = complaint();
  const list = el("div", {}, loading());
  const pages = el("nav", { class: "row pages", "aria-label": "Pages" });
  const view = { page: 1, gone: false, reload, failed: (error) => tell(trouble, reason(error)) };
  const turn = (step, text) => el("button", { type: "button", onclick: async () => {
    view.page += step;
    pages.inert = true;
    await reload();
    pages.inert = false;
    list.firstElementChild?.focus({ preventScroll: true });
    shown(list);
  } }, text);
  place.replaceChildren(head, trouble, list, pages);
  async function reload() {
    try {
      const found = await load(view.page);
      if (view.gone) return;
      tell(trouble, "");
      replace(found.content);
      pages.replaceChildren(...[view.page > 1 ? turn(-1, before) : null, view.page < found.pages ? turn(1, behind) : null, found.words ? el("span", { class: "muted" }, found.words) : null].filter(Boolean));
    } catch (error) {
      if (view.gone) return;
      list.replaceChildren();
      view.failed(error);
    }
  }
  // Replaces the content of the list, and keeps the keyboard focus in the list.
  function replace(content) {
    const had = list.contains(document.activeElement) ? document.activeElement.closest("[data-key]")?.dataset.key ?? "" : null;
    list.replaceChildren(content);
    if (had === null) return;
    (list.querySelector(`[data-key="${CSS.escape(had)}"] button`) ?? list.firstElementChild).focus({ preventScroll: true });
  }
  reload();
  return view;
}

// -- keys

const KEY_STATES = { active: "ready", revoked: "resting", expired: "failing", deleted: "failing" };
const KEY_WORDS = { active: "active", revoked: "blocked", expired: "expired", deleted: "deleted" };
const managesKeys = () => ["master", "admin", "team_admin", "user"].includes(role());

function keyList(place, search) {
  const sought = el("input", { type: "search", "aria-label": "Filter keys by name", placeholder: "Name", autocomplete: "off", value: search.get("name") ?? "" });
  const create = managesKeys() ? el("button", { type: "button", class: "primary", onclick: () => keyForm(null, view.reload) }, "Create a key") : null;
  const form = el("form", { class: "inline" }, el("div", { class: "field" }, sought), el("button", { type: "submit" }, "Filter"), create);
  form.addEventListener("submit", (event) => { event.preventDefault(); view.page = 1; view.reload(); });
  const view = listing(place, form, ["Previous", "Next"], async (page) => {
    const found = await json(`/key/list${query({ return_full_object: true, page, size: PAGE, key_alias: sought.value.trim() })}`);
    const words = found.total_pages > 1 ? `Page ${found.current_page} of ${found.total_pages}, ${number(found.total_count)} keys` : "";
    return { content: keyTable(found.keys, view, sought.value), pages: found.total_pages, words };
  });
  return () => { view.gone = true; };
}

function keyTable(list, { reload, failed }, name) {
  const may = managesKeys();
  const act = (text, path, body, kind) => el("button", { type: "button", class: `small ${kind ?? ""}`, onclick: async (event) => {
    // A disabled button would lose the focus.
    if (event.target.ariaBusy) return;
    event.target.ariaBusy = "true";
    try {
      await json(path, { body });
      await reload();
    } catch (error) {
      event.target.ariaBusy = null;
      failed(error);
    }
  } }, text);
  const rows = list.map((key) => ({ key: key.token, cells: [
    el("span", {}, el("a", { class: "named", href: `#/requests${query({ key: key.token })}`, title: "Requests of this key" }, key.key_alias ?? "unnamed"), " ", el("span", { class: "muted" }, key.key_name), el("br"), el("code", { class: "muted small-text" }, key.token)),
    el("span", {}, el("span", { class: `state is-${KEY_STATES[key.status]}` }, el("span", { class: "dot", "aria-hidden": "true" }), KEY_WORDS[key.status] ?? key.status),
      el("span", { class: "muted small-text until" }, key.expires ? `until ${moment(Date.parse(key.expires) / 1000).slice(0, 16)}` : "never expires")),
    el("span", {}, key.team_id ?? "–", key.user_id ? el("span", { class: "muted" }, ` / ${key.user_id}`) : null),
    el("span", { class: "named" }, key.models.length ? key.models.join(", ") : "all"),
    el("span", { class: "named" }, limits(key)),
    budget({ ...key, ...key.litellm_budget_table }),
    el("span", { class: "actions" },
      may && key.status !== "deleted" ? [
        el("button", { type: "button", class: "small", onclick: () => keyForm(key, reload) }, "Edit"),
        el("button", { type: "button", class: "small", onclick: () => rotate(key, reload) }, "Rotate"),
        key.blocked ? act("Unblock", "/key/unblock", { key: key.token }) : act("Block", "/key/block", { key: key.token }),
        el("button", { type: "button", class: "small danger", onclick: () => confirmed(`Delete the key ${key.key_alias ?? key.token}?`, "The key is refused immediately and permanently. Its usage records remain.", "Delete", () => json("/key/delete", { body: { keys: [key.token] } }), reload) }, "Delete"),
      ] : null),
  ] }));
  const none = name ? "No key has this name." : "No keys yet. Only the master key exists.";
  return table("Keys", ["Name", "State", "Team / user", "Models", "Limits", "Spend", "Actions"], rows, none);
}

function rotate(key, reload) {
  dialog(`Rotate ${key.key_alias ?? key.token}`, (close) => {
    const trouble = complaint();
    const grace = el("input", { type: "text", placeholder: "not at all", "aria-label": "The old secret stays valid for" });
    const content = el("div", { class: "stack" },
      el("p", {}, "The key gets a new secret. Its id, team, limits and usage stay the same."),
      el("div", { class: "field" }, el("label", {}, "The old secret stays valid for (such as 1h)"), grace), trouble,
      el("div", { class: "row" }, el("button", { type: "button", class: "primary", onclick: async () => {
        try {
          const body = { key: key.token, ...(grace.value.trim() ? { grace_period: grace.value.trim() } : {}) };
          const made = await json("/key/regenerate", { body });
          content.replaceChildren(...secret(made, close));
          reload();
        } catch (error) {
          tell(trouble, reason(error));
        }
      } }, "Rotate"), el("button", { type: "button", onclick: close }, "Cancel")));
    return content;
  });
}

// The secret is in the page only until the dialog is closed.
export function secret(made, close) {
  return [
    el("p", {}, "This is shown once. Copy it now:"),
    el("pre", { class: "code secret", tabindex: "0", "aria-label": "Secret of the key" }, made.key),
    el("div", { class: "row" }, copier("key", () => made.key), el("button", { type: "button", class: "primary", onclick: close }, "Done")),
  ];
}

// -- teams

function teamList(place) {
  const create = changesAll() ? el("button", { type: "button", class: "primary", onclick: () => teamForm(null, view.reload) }, "Create a team") : null;
  const view = listing(place, el("div", { class: "row" }, create), ["Previous", "Next"], async (page) => {
    const found = await json(`/v2/team/list${query({ page, page_size: PAGE })}`);
    // The list does not contain the spend.
    const teams = await Promise.all(found.teams.map((team) => json(`/team/info${query({ team_id: team.team_id })}`).then((one) => ({ ...one.team_info, keys: one.keys?.length ?? 0 }), () => team)));
    return { content: teamTable(teams, view), pages: found.total_pages, words: found.total_pages > 1 ? `Page ${page} of ${found.total_pages}` : "" };
  });
  return () => { view.gone = true; };
}

function teamTable(teams, { reload, failed }) {
  const may = changesAll();
  const rows = teams.map((team) => ({ key: team.team_id, cells: [
    el("span", {}, el("a", { class: "named", href: `#/requests${query({ team: team.team_id })}`, title: "Requests of this team" }, team.team_alias ?? team.team_id), " ", el("code", { class: "muted" }, team.team_id)),
    el("span", { class: `state is-${team.blocked ? "resting" : "ready"}` }, el("span", { class: "dot", "aria-hidden": "true" }), team.blocked ? "blocked" : "active"),
    number(team.keys ?? 0),
    number(team.members?.length ?? 0),
    el("span", { class: "named" }, team.models.length ? team.models.join(", ") : "all"),
    el("span", { class: "named" }, limits(team)),
    budget(team),
    el("span", { class: "actions" },
      may ? [
        el("button", { type: "button", class: "small", onclick: () => teamForm(team, reload) }, "Edit"),
        el("button", { type: "button", class: "small", onclick: () => json(team.blocked ? "/team/unblock" : "/team/block", { body: { team_id: team.team_id } }).then(reload, failed) }, team.blocked ? "Unblock" : "Block"),
        el("button", { type: "button", class: "small danger", onclick: () => confirmed(`Delete the team ${team.team_alias ?? team.team_id}?`, "Its keys are revoked permanently.", "Delete", () => json("/team/delete", { body: { team_ids: [team.team_id] } }), reload) }, "Delete"),
      ] : null),
  ] }));
  return table("Teams", ["Team", "State", ["Keys", "n"], ["Members", "n"], "Models", "Limits", "Spend", "Actions"], rows, "No teams yet.");
}

// -- audit

function auditList(place) {
  const view = listing(place, "", ["Newer", "Older"], async (page) => {
    const found = await json(`/audit${query({ page, page_size: PAGE })}`);
    return { content: auditTable(found.audit_logs), pages: found.total_pages, words: `${number(found.total)} changes` };
  });
  return () => { view.gone = true; };
}

function auditTable(records) {
  const rows = records.map((one) => ({ key: one.id, cells: [
    moment(Date.parse(one.updated_at) / 1000),
    one.changed_by === "master_key" ? "master key" : el("code", {}, one.changed_by),
    one.action,
    el("span", {}, one.table_name, " ", el("code", {}, one.object_id)),
    el("span", { class: "named changes" }, changes(one.before_value, one.updated_values)),
  ] }));
  return table("Audit records", ["Time", "By", "Action", "Object", "Changed values"], rows, "No changes are stored.");
}

const brief = (value) => (value === undefined || value === null ? "none" : typeof value === "string" ? value : JSON.stringify(value)).slice(0, 80);

function changes(before, after) {
  const names = Object.keys({ ...before, ...after }).filter((name) => !/(_at|^token_id|_by|key_name)$/.test(name) && JSON.stringify(before?.[name] ?? null) !== JSON.stringify(after?.[name] ?? null));
  const first = names.filter((name) => before || !isEmpty(after[name])).slice(0, 8);
  return first.map((name) => `${name}: ${before ? `${brief(before[name])} → ` : ""}${brief(after?.[name])}`).join("; ") || "–";
}

const isEmpty = (value) => value === null || value === false || (typeof value === "object" && Object.keys(value).length === 0);
