// API reference: the operations of the OpenAPI document of this gateway, with their parameters, fields and answers.

import { json, reason } from "/page/lib/api.js";
import { complaint, el, loading, table, tell } from "/page/lib/dom.js";

const MOST_LEVELS = 4;
const SHOWN_VALUES = 12;

export function reference(main) {
  const place = el("div", {}, loading());
  const failed = complaint();
  const seeking = el("input", { type: "search", placeholder: "Path or summary", "aria-label": "Filter the operations", autocomplete: "off" });
  main.append(
    el("h1", {}, "API reference"),
    el("p", { class: "lead muted" }, "All operations of this gateway, from its ", el("a", { href: "/openapi.json" }, "OpenAPI document"), ", which requires a key."),
    el("div", { class: "seeking" }, seeking), failed, place,
  );
  let left = false;
  load().catch((error) => {
    if (left) return;
    place.replaceChildren();
    tell(failed, reason(error));
  });

  async function load() {
    const made = await json("/openapi.json");
    if (left) return;
    const operations = operationsOf(made);
    const draw = () => place.replaceChildren(...listed(operations.filter(fits(seeking.value)), made));
    seeking.addEventListener("input", draw);
    draw();
  }
  return () => { left = true; };
}

function operationsOf(made) {
  return Object.entries(made.paths).flatMap(([path, methods]) =>
    Object.entries(methods).map(([method, operation]) => ({ path, method: method.toUpperCase(), operation, tag: operation.tags?.[0] ?? "other" })));
}

function fits(text) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  return ({ path, method, operation }) => {
    const all = `${method} ${path} ${operation.summary ?? ""}`.toLowerCase();
    return words.every((word) => all.includes(word));
  };
}

function listed(operations, made) {
  if (!operations.length) return [el("p", { class: "empty" }, "No operation matches.")];
  const tags = [...new Set(operations.map(({ tag }) => tag))];
  return tags.map((tag) =>
    el("section", {}, el("h2", {}, tag), ...operations.filter((each) => each.tag === tag).map((each) => entry(each, made))));
}

// The content of an operation is built when the operation is opened for the first time.
function entry({ path, method, operation }, made) {
  const node = el("details", {}, el("summary", {}, el("code", {}, `${method} ${path}`), ` ${operation.summary ?? ""}`));
  node.addEventListener("toggle", () => node.append(...content(`${method} ${path}`, operation, made)), { once: true });
  return node;
}

function content(name, operation, made) {
  const titled = (title, heads, rows) => el("div", {}, el("h3", {}, title), table(`${title} of ${name}`, heads, rows, "None."));
  const parameters = (operation.parameters ?? []).map((each) => [each.name, each.in, typeOf(each.schema ?? {}, made), each.required, each.description ?? each.schema?.description]);
  const body = schemaIn(operation.requestBody?.content);
  const answers = Object.entries(operation.responses ?? {}).map(([status, answer]) => {
    const found = resolved(answer, made);
    return [status, found.description ?? "", typeOf(schemaIn(found.content) ?? {}, made)];
  });
  const answer = schemaIn(resolved(operation.responses?.["200"] ?? {}, made).content);
  return [
    operation.security?.length ? null : el("p", { class: "note" }, "Needs no key."),
    parameters.length ? titled("Parameters", ["name", "in", "type", "required", "meaning"], parameters.map(named)) : null,
    body && titled("Fields of the request", ["name", "type", "required", "meaning"], fieldsOf(body, made).map(named)),
    titled("Answers", ["status", "meaning", "type"], answers.map(named)),
    answer && fieldsOf(answer, made).length ? titled("Fields of the answer", ["name", "type", "required", "meaning"], fieldsOf(answer, made).map(named)) : null,
  ].filter(Boolean);
}

function named([name, ...rest]) {
  return [el("code", {}, name), ...rest.map((cell) => el("span", { class: "named" }, cell === true ? "yes" : cell || ""))];
}

// Returns the JSON schema of a body: that of the first media type with a schema.
function schemaIn(content) {
  const kinds = Object.values(content ?? {});
  return kinds.find((kind) => kind.schema)?.schema;
}

function resolved(value, made) {
  const [, ...steps] = (value?.$ref ?? "").split("/");
  return steps.length ? steps.reduce((inner, step) => inner?.[step], made) ?? {} : value;
}

function fieldsOf(schema, made) {
  const found = resolved(schema, made);
  const inner = found.anyOf ?? found.oneOf ?? found.allOf;
  if (inner) return inner.flatMap((each) => fieldsOf(each, made));
  const required = new Set(found.required ?? []);
  return Object.entries(found.properties ?? {}).map(([name, each]) => [name, typeOf(each, made), required.has(name), resolved(each, made).description]);
}

function typeOf(schema, made, level = 0) {
  if (level > MOST_LEVELS) return "…";
  const ref = schema.$ref?.split("/").at(-1);
  if (ref) return ref;
  const inner = schema.anyOf ?? schema.oneOf ?? schema.allOf;
  if (inner) return [...new Set(inner.map((each) => typeOf(each, made, level + 1)))].join(" or ");
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.slice(0, SHOWN_VALUES).map((value) => JSON.stringify(value)).join(", ");
  if (schema.type === "array") return `list of ${typeOf(schema.items ?? {}, made, level + 1)}`;
  return [schema.type ?? []].flat().join(" or ") || (Object.keys(schema).length ? "any" : "");
}
