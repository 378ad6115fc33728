// Requests: a live list with filters and pages, and the facts of one request.

import { json, query, reason } from "/page/lib/api.js";
import { complaint, copier, el, empty, facts, field, loading, section, select, svg, table, tell } from "/page/lib/dom.js";
import { dollars, moment, day, number, seconds } from "/page/lib/format.js";
import { renew } from "/page/lib/renew.js";
import { role, state, watch } from "/page/lib/store.js";
import { causes, inWords } from "/page/lib/words.js";

const EVERY_MS = 3000;
const LISTED = 50;
const FILTERS = ["failed", "status", "model", "deployment", "key", "team", "recovery"];

export function requests(main, id, search) {
  return id ? one(main, id) : list(main, search);
}

// -- the list

function list(main, search) {
  // The address must not contain filters that have no effect.
  const unknown = [...search.keys()].filter((name) => name !== "cursor" && !FILTERS.includes(name));
  for (const name of unknown) search.delete(name);
  if (unknown.length) history.replaceState(null, "", `#/requests${query(Object.fromEntries(search))}`);
  const text = (name, hint) => el("input", { type: "text", spellcheck: "false", autocapitalize: "off", autocomplete: "off", placeholder: hint, value: search.get(name) ?? "" });
  const models = el("datalist", { id: "known-models" });
  const of = {
    id: el("input", { type: "search", spellcheck: "false", autocapitalize: "off", autocomplete: "off", placeholder: "req_…" }),
    outcome: select([["", "all"], ["failed", "failed"], ["400", "400"], ["401", "401"], ["403", "403"], ["404", "404"], ["429", "429"], ["499", "499 client left"], ["500", "500"], ["502", "502"], ["503", "503"], ["504", "504"]], search.get("failed") ? "failed" : search.get("status") ?? ""),
    recovery: select([["", "all"], ["any", "any recovery"]], ""),
    model: text("model", "name"), deployment: text("deployment", "name"), key: text("key", "key_…"), team: text("team", "id"),
  };
  of.model.setAttribute("list", models.id);
  const form = el("form", { class: "filters", "aria-label": "Filters" },
    field("Request id", of.id), field("Outcome", of.outcome), field("Recovery", of.recovery), field("Model", of.model, null),
    field("Deployment", of.deployment), field("Key", of.key), field("Team", of.team),
    el("button", { type: "submit", class: "primary" }, "Filter"),
    el("a", { href: "#/requests", class: "button" }, "Clear"));
  const trouble = complaint();
  const place = el("div", {}, loading());
  const cursor = search.get("cursor") ?? "";
  const live = el("span", { class: "muted small-text" });
  const pages = el("nav", { class: "row pages", "aria-label": "Pages" });
  let gone = false;
  let timer = 0;

  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const wanted = of.id.value.trim();
    if (wanted) {
      location.hash = `#/requests/${encodeURIComponent(wanted)}`;
      return;
    }
    const outcome = of.outcome.value;
    const values = { failed: outcome === "failed", status: outcome === "failed" ? "" : outcome };
    for (const name of ["recovery", "model", "deployment", "key", "team"]) values[name] = of[name].value.trim();
    const next = `#/requests${query(values)}`;
    if (location.hash === next) look();
    else location.hash = next;
  });
  main.append(el("div", { class: "heading" }, el("h1", {}, "Requests"), live), el("details", { class: "filter-box", open: matchMedia("(min-width: 60rem)").matches || FILTERS.some((name) => search.get(name)) }, el("summary", {}, "Filters"), form), models, trouble, place, pages);
  const unwatch = watch(({ status }) => {
    if (!status) return;
    of.team.closest(".field").hidden = !["master", "admin", "viewer", "team_admin"].includes(status.role) || status.keyless;
    of.key.closest(".field").hidden = role() === "key" || status.keyless;
    if (of.recovery.options.length === 2) {
      of.recovery.append(...Object.keys(status.rules).map((rule) => el("option", { value: rule }, rule)));
      of.recovery.value = search.get("recovery") ?? "";
      models.append(...status.models.map((model) => el("option", { value: model.id })));
    }
  });

  async function look() {
    clearTimeout(timer);
    try {
      if (!document.hidden && !state.paused) {
        const wanted = Object.fromEntries(FILTERS.map((name) => [name, search.get(name)]));
        const found = await json(`/v1/requests${query({ ...wanted, cursor, limit: LISTED })}`);
        if (gone) return;
        tell(trouble, "");
        renew(place, drawn(found, FILTERS.some((name) => search.get(name)), cursor));
        renew(pages, ...pageLinks(search, cursor, found));
        live.textContent = cursor ? "An older page, which is not updated" : "Updated every 3 s";
      }
    } catch (error) {
      if (!gone) {
        tell(trouble, reason(error));
        if (place.querySelector(".late")) place.replaceChildren();
      }
    }
    // Older pages do not change.
    if (!gone && !cursor) timer = setTimeout(look, EVERY_MS);
  }
  look();
  return () => {
    gone = true;
    clearTimeout(timer);
    unwatch();
  };
}

function pageLinks(search, cursor, found) {
  const to = (next) => {
    const values = new URLSearchParams(search);
    values.delete("cursor");
    if (next) values.set("cursor", next);
    return `#/requests${String(values) ? `?${values}` : ""}`;
  };
  return [
    cursor ? el("a", { class: "button", href: to("") }, "Newest") : null,
    found.next_cursor ? el("a", { class: "button", href: to(found.next_cursor) }, "Older") : null,
  ].filter(Boolean);
}

function drawn(found, isFiltered, cursor) {
  const rows = found.data.map((record) => ({
    key: record.id,
    cells: [
      el("a", { href: `#/requests/${encodeURIComponent(record.id)}` }, el("time", {}, day(record.at))),
      statusOf(record),
      el("span", { class: "named" }, record.model ?? el("code", {}, `${record.method ?? ""} ${record.route ?? ""}`)),
      el("span", { class: "named" }, record.deployment ?? "–", (record.attempts?.length ?? 0) > 1 ? el("span", { class: "muted" }, ` after ${record.attempts.length - 1}`) : null),
      record.key_name ?? record.key ?? "–",
      record.output_tokens === undefined && record.input_tokens === undefined ? "–" : `${number(record.input_tokens ?? 0)} + ${number(record.output_tokens ?? 0)}`,
      seconds(record.first_token_s),
      seconds(record.duration_s),
      dollars(record.cost),
      el("span", { class: "chips" }, record.recoveries?.length ? record.recoveries.map((rule) => el("code", { class: "rule", title: state.status?.rules?.[rule] }, rule)) : "–"),
    ],
  }));
  const none = isFiltered ? "No stored request matches the filters." : cursor ? "No older requests." : "No requests yet. Send one in the playground, or with the code that it exports. Records are stored for 30 days.";
  if (!rows.length) return el("div", {}, empty(none), isFiltered || cursor ? null : el("p", {}, el("a", { href: "#/playground", class: "button" }, "Open the playground")));
  return table("Requests", ["Time", "Outcome", "Model", "Deployment", "Key", ["Tokens in + out", "n"], ["First token", "n"], ["Duration", "n"], ["Cost", "n"], "Recoveries"], rows, none);
}

function statusOf(record) {
  const failed = record.status >= 400 || record.error;
  const words = failed ? record.error ?? "" : record.finish ?? "";
  return el("span", { class: failed ? "bad" : undefined, title: failed ? inWords(record) : undefined }, `${record.status || ""} ${words}`.trim() || "ok");
}

// -- one request

function one(main, id) {
  const place = el("div", {}, loading());
  const trouble = complaint();
  let gone = false;
  main.append(el("p", { class: "crumbs" }, el("a", { href: "#/requests" }, "Requests")), el("h1", { class: "mono" }, id), trouble, place);
  read(id, () => gone).then(
    (record) => { if (!gone) show(record); },
    (error) => {
      if (gone) return;
      place.replaceChildren();
      tell(trouble, reason(error));
    },
  );
  let unwatch = () => {};
  async function show(record) {
    const recording = el("p", { class: "row" });
    const why = el("p", { class: "cause", hidden: true });
    place.replaceChildren(...about(record, recording, why));
    unwatch = watch(({ status }) => {
      if (!status) return;
      const found = record.status >= 400 || record.error ? causes(record, status) : [];
      why.hidden = !found.length;
      if (found.length) renew(why, `Current cause: ${found.join("; ")}`);
    });
    try {
      await json(`/v1/traces/${encodeURIComponent(record.id)}`, { quiet: true });
      if (!gone) recording.append(el("a", { class: "button primary", href: `#/inspector/${encodeURIComponent(record.id)}` }, "Inspect its tokens"));
    } catch {
      if (gone) return;
      recording.append(el("span", { class: "muted" }, state.status?.traces === "off"
        ? "Its tokens were not recorded: unisono.traces.mode is off."
        : "There is no recording of its tokens for this key."));
    }
  }
  return () => { gone = true; unwatch(); };
}

// A record is written a moment after its answer.
async function read(id, isGone) {
  for (let left = 6; ; left -= 1) {
    try {
      return await json(`/v1/requests/${encodeURIComponent(id)}`);
    } catch (error) {
      if (left <= 0 || error.status !== 404 || isGone()) throw error;
      await new Promise((resolve) => setTimeout(resolve, 300));
    }
  }
}

function about(record, recording, why) {
  const failed = record.status >= 400 || record.error;
  const made = record.output_tokens > 1 && record.first_token_s !== undefined ? record.output_tokens / Math.max(record.duration_s - record.first_token_s, 0.001) : null;
  return [
    failed ? el("p", { class: "trouble" }, `${[record.status || null, record.error].filter(Boolean).join(" ")}: ${inWords(record)}`) : null,
    why,
    el("div", { class: "row" }, recording, copier("permalink", () => `${location.origin}/#/requests/${encodeURIComponent(record.id)}`)),
    facts([
      ["Time", moment(record.at)],
      ["Request", `${record.method ?? ""} ${record.route ?? ""}`.trim()],
      ["Outcome", [record.status || null, failed ? record.error : record.finish].filter(Boolean).join(" ")],
      ["Model", record.served_model && record.served_model !== record.model ? `${record.model}, answered by ${record.served_model}` : record.model],
      ["Deployment", record.deployment],
      ["Key", [record.key_name, record.key].filter(Boolean).join(" ")],
      ["Team", record.tenant],
      ["End user", record.user],
      ["Input tokens", record.input_tokens && `${number(record.input_tokens)}${record.cached_tokens ? `, ${number(record.cached_tokens)} cached` : ""}`],
      ["Output tokens", record.output_tokens && `${number(record.output_tokens)}${record.reasoning_tokens ? `, ${number(record.reasoning_tokens)} reasoning` : ""}`],
      ["Pace", made && `${number(made)} tokens per second`],
      ["Cost", record.cost && dollars(record.cost)],
      ["Trace id", record.trace_id],
    ]),
    section("timeline", "Timeline", timeline(record)),
    record.attempts?.length ? section("attempts", "Attempts", el("ol", { class: "attempts" }, record.attempts.map((attempt) =>
      el("li", {}, el("strong", { class: "named" }, attempt.deployment), " ", attempt.error ? el("span", { class: "bad" }, `${attempt.error}: ${inWords(attempt)}`) : el("span", { class: "good" }, "answered"))))) : null,
    record.recoveries?.length ? section("recoveries", "Recoveries", el("ul", { class: "plain" }, record.recoveries.map((rule) =>
      el("li", {}, el("code", { class: "rule" }, rule), " ", state.status?.rules?.[rule] ?? "")))) : null,
    record.notes?.length ? section("notes", "Fields without effect", el("p", {}, record.notes.join(", "))) : null,
  ].filter(Boolean);
}

// Bars for the queue, the time to the first token, and the output.
function timeline(record) {
  const total = Math.max(record.duration_s, 0.001);
  const first = record.first_token_s ?? total;
  const waited = Math.min(record.waited_s ?? 0, first);
  const parts = [["queue", 0, waited, "bar-queue"], ["prompt", waited, first, "bar-wait"], ["output", first, total, "bar-some"]].filter(([, from, to]) => to > from);
  const x = (at) => (1000 * at) / total;
  const words = parts.map(([name, from, to]) => `${name} ${seconds(to - from)}`).join(", ");
  return el("div", {},
    svg("svg", { viewBox: "0 0 1000 24", class: "timeline", preserveAspectRatio: "none", role: "img", "aria-label": words },
      parts.map(([, from, to, kind]) => svg("rect", { x: x(from), y: 2, width: Math.max(x(to) - x(from), 2), height: 20, class: kind }))),
    el("p", { class: "timeline-key" }, parts.map(([name, from, to, kind]) => el("span", {}, el("i", { class: kind, "aria-hidden": "true" }), `${name} ${seconds(to - from)}`)), el("span", { class: "muted" }, `${seconds(total)} in total`)));
}
