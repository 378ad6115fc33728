// Builds the body and the headers of a request for each of the four APIs from settings and turns.
//
// A turn is `{kind: "user", text}`, `{kind: "tool", callId, called, text}`, `{kind: "approval", id, approve}`, or
// `{kind: "assistant", text, calls, items, blocks}`, with the output items of Responses or the content of Messages.

export const APIS = { chat: "Chat Completions", responses: "Responses", messages: "Messages", completions: "Raw completions" };
const PATHS = { chat: "/v1/chat/completions", responses: "/v1/responses", messages: "/v1/messages", completions: "/v1/completions" };
// Messages requires a limit, and raw completions have a low one by default.
const MOST_TOKENS = 4096;

const EXTRA = ["unisono", "skip_special_tokens"];

export class Unreadable extends Error {
  constructor(field, message) {
    super(message);
    this.field = field;
  }
}

function parsed(field, text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Unreadable(field, `This is not JSON: ${error.message}`);
  }
}

export function toRequest(settings, turns) {
  const more = settings.more.trim() ? parsed("more", settings.more) : {};
  if (typeof more !== "object" || more === null || Array.isArray(more)) throw new Unreadable("more", "Further fields must be an object: {...}");
  // A further field `stream` overrides the setting, and other fields of the body depend on `stream`.
  const given = { ...settings, stream: Object.hasOwn(more, "stream") ? more.stream : settings.stream };
  const body = { model: given.model, ...BUILDERS[given.surface](given, turns) };
  const sampling = { temperature: given.temperature, top_p: given.topP, seed: given.surface === "messages" || given.surface === "responses" ? "" : given.seed };
  if (given.surface === "chat" || given.surface === "completions") Object.assign(sampling, { frequency_penalty: given.frequency, presence_penalty: given.presence });
  for (const [name, value] of Object.entries(sampling)) if (value !== "") body[name] = Number(value);
  const stops = given.stop.split("\n").filter(Boolean);
  if (stops.length && given.surface !== "responses") body[given.surface === "messages" ? "stop_sequences" : "stop"] = stops;
  if (given.stream) body.stream = true;
  // Fields that a client library may not know.
  const extra = [...EXTRA, ...Object.keys(more).filter((name) => !Object.hasOwn(body, name))];
  Object.assign(body, more);
  return { path: PATHS[given.surface], body, extra, headers: given.deployment ? { "x-unisono-deployment": encodeURIComponent(given.deployment) } : {} };
}

const BUILDERS = {
  chat(given, turns) {
    const body = { messages: [...(given.system ? [{ role: "system", content: given.system }] : []), ...turns.filter((turn) => turn.kind !== "approval").map(toMessage)] };
    const tools = toTools(given.tools, "chat");
    if (tools.length) body.tools = tools;
    if (tools.length && given.choice !== "auto") body.tool_choice = toChoice(given.choice, "chat");
    if (tools.length && given.oneCall) body.parallel_tool_calls = false;
    if (given.effort) body.reasoning_effort = given.effort;
    if (given.most !== "") body.max_completion_tokens = Number(given.most);
    const format = toFormat(given);
    if (format) body.response_format = format.type === "json_schema" ? { type: "json_schema", json_schema: format.of } : format;
    if (given.servers.trim()) body.unisono = { run_tools: true };
    if (given.stream) body.stream_options = { include_usage: true };
    return body;
  },
  responses(given, turns) {
    const body = { ...(given.system ? { instructions: given.system } : {}), input: turns.flatMap(toItems) };
    const tools = [...toTools(given.tools, "responses"), ...toServers(given)];
    if (tools.length) body.tools = tools;
    if (tools.length && given.choice !== "auto") body.tool_choice = toChoice(given.choice, "responses");
    if (tools.length && given.oneCall) body.parallel_tool_calls = false;
    if (given.effort) body.reasoning = { effort: given.effort };
    if (given.most !== "") body.max_output_tokens = Number(given.most);
    const format = toFormat(given);
    if (format) body.text = { format: format.type === "json_schema" ? { type: "json_schema", ...format.of } : format };
    body.store = false;
    return body;
  },
  messages(given, turns) {
    const body = { max_tokens: given.most === "" ? MOST_TOKENS : Number(given.most), ...(given.system ? { system: given.system } : {}), messages: toBlocks(turns) };
    const tools = toTools(given.tools, "messages");
    if (tools.length) body.tools = tools;
    if (tools.length && given.choice !== "auto") body.tool_choice = toChoice(given.choice, "messages");
    body.thinking = { type: "adaptive" };
    const format = toFormat(given);
    const config = { ...(given.effort ? { effort: given.effort } : {}), ...(format?.of ? { format: { type: "json_schema", schema: format.of.schema } } : {}) };
    if (Object.keys(config).length) body.output_config = config;
    return body;
  },
  completions(given, turns) {
    const prompt = turns.map((turn) => turn.text).join("");
    return { prompt, max_tokens: given.most === "" ? MOST_TOKENS : Number(given.most), skip_special_tokens: false };
  },
};

function toMessage(turn) {
  if (turn.kind === "tool") return { role: "tool", tool_call_id: turn.callId, content: turn.text };
  if (turn.kind === "user") return { role: "user", content: turn.text };
  const called = turn.calls?.length;
  return { role: "assistant", content: turn.text || (called ? null : ""), ...(called ? { tool_calls: turn.calls.map(({ id, name, text }) => ({ id, type: "function", function: { name, arguments: text } })) } : {}) };
}

function toItems(turn) {
  if (turn.kind === "tool") return [{ type: "function_call_output", call_id: turn.callId, output: turn.text }];
  if (turn.kind === "approval") return [{ type: "mcp_approval_response", approval_request_id: turn.id, approve: turn.approve }];
  if (turn.kind === "user") return [{ role: "user", content: turn.text }];
  if (turn.items) return turn.items;
  const items = turn.text || !turn.calls?.length ? [{ role: "assistant", content: turn.text }] : [];
  return [...items, ...(turn.calls ?? []).map(({ id, name, text }) => ({ type: "function_call", call_id: id, name, arguments: text }))];
}

// Adjacent turns of the same role form one message, such as tool results and the text after them.
function toBlocks(turns) {
  const messages = [];
  for (const turn of turns.filter(({ kind }) => kind !== "approval")) {
    const role = turn.kind === "assistant" ? "assistant" : "user";
    const content = contentOf(turn);
    if (messages.at(-1)?.role === role) messages.at(-1).content.push(...content);
    else messages.push({ role, content });
  }
  return messages;
}

function contentOf(turn) {
  if (turn.kind === "tool") return [{ type: "tool_result", tool_use_id: turn.callId, content: turn.text }];
  if (turn.kind === "user") return [{ type: "text", text: turn.text }];
  if (turn.blocks) return turn.blocks;
  const calls = (turn.calls ?? []).map(({ id, name, text }) => ({ type: "tool_use", id, name, input: inputOf(text) }));
  return [...(turn.text ? [{ type: "text", text: turn.text }] : []), ...calls];
}

function inputOf(text) {
  try {
    return JSON.parse(text || "{}");
  } catch {
    return { input: text };
  }
}

// Tools may be pasted in the format of any API.
function toTools(text, surface) {
  if (!text.trim()) return [];
  const tools = parsed("tools", text);
  if (!Array.isArray(tools)) throw new Unreadable("tools", "Tools must be a list: [{...}, ...]");
  return tools.map((tool) => {
    const of = tool?.function ?? (tool?.input_schema ? { name: tool.name, description: tool.description, parameters: tool.input_schema } : tool?.type === "function" ? without(tool, "type") : null);
    if (!of) return tool;
    if (surface === "chat") return { type: "function", function: of };
    if (surface === "responses") return { type: "function", ...of };
    return { name: of.name, ...(of.description ? { description: of.description } : {}), input_schema: of.parameters ?? { type: "object" } };
  });
}

function without(value, name) {
  const { [name]: _, ...rest } = value;
  return rest;
}

// One server per line: a label of the configuration, or a label and a URL.
function toServers({ servers, approval }) {
  return servers.split("\n").map((line) => line.trim()).filter(Boolean).map((line) => {
    const [label, url] = line.split(/\s+/);
    return { type: "mcp", server_label: label, ...(url ? { server_url: url } : {}), require_approval: approval };
  });
}

function toChoice(choice, surface) {
  if (surface === "messages") return { none: { type: "none" }, required: { type: "any" } }[choice] ?? { type: "tool", name: choice };
  if (choice === "none" || choice === "required") return choice;
  return surface === "chat" ? { type: "function", function: { name: choice } } : { type: "function", name: choice };
}

function toFormat({ format, schema }) {
  if (format === "text") return null;
  if (format === "json_object") return { type: "json_object" };
  return { type: "json_schema", of: { name: "answer", schema: parsed("schema", schema), strict: false } };
}

// Returns the tool names for the tool choice; empty while they cannot be parsed.
export function toolNames(text) {
  try {
    return JSON.parse(text).map((tool) => tool?.function?.name ?? tool?.name).filter((name) => typeof name === "string");
  } catch {
    return [];
  }
}
