// Builds a request body for either surface from the fields of the playground.

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

// `given` contains the field values as text.
export function toRequest(given) {
  const chat = given.surface === "chat";
  const body = { model: given.model };
  if (chat) body.messages = toMessages(given);
  else Object.assign(body, given.system ? { instructions: given.system } : {}, { input: given.messages.flatMap(toItems) });
  const tools = toTools(given.tools, chat);
  if (tools.length) body.tools = tools;
  if (tools.length && given.choice !== "auto") body.tool_choice = toChoice(given.choice, chat);
  if (given.effort) Object.assign(body, chat ? { reasoning_effort: given.effort } : { reasoning: { effort: given.effort } });
  if (given.temperature !== "") body.temperature = Number(given.temperature);
  if (given.most !== "") body[chat ? "max_completion_tokens" : "max_output_tokens"] = Number(given.most);
  const format = toFormat(given, chat);
  if (format) Object.assign(body, chat ? { response_format: format } : { text: { format } });
  if (!chat) body.store = false;
  if (given.stream) {
    body.stream = true;
    if (chat) body.stream_options = { include_usage: true };
  }
  return { path: chat ? "/v1/chat/completions" : "/v1/responses", body };
}

function toMessages({ system, messages }) {
  return [
    ...(system ? [{ role: "system", content: system }] : []),
    ...messages.map(({ role, content, calls, callId }) => {
      if (role === "tool") return { role, tool_call_id: callId, content };
      const called = role === "assistant" && calls?.length;
      return { role, content: content || (called ? null : ""), ...(called ? { tool_calls: calls.map(toCall) } : {}) };
    }),
  ];
}

const toCall = ({ id, name, text }) => ({ id, type: "function", function: { name, arguments: text } });

function toItems({ role, content, calls, callId }) {
  if (role === "tool") return [{ type: "function_call_output", call_id: callId, output: content }];
  const items = content || !calls?.length ? [{ role, content }] : [];
  return [...items, ...(calls ?? []).map(({ id, name, text }) => ({ type: "function_call", call_id: id, name, arguments: text }))];
}

// Tools may be pasted in the format of either surface.
function toTools(text, chat) {
  if (!text.trim()) return [];
  const tools = parsed("tools", text);
  if (!Array.isArray(tools)) throw new Unreadable("tools", "Tools must be a list: [{...}, ...]");
  return tools.map((tool) => {
    if (chat && tool?.type === "function" && !tool.function) {
      const { type, ...of } = tool;
      return { type, function: of };
    }
    return !chat && tool?.function ? { type: "function", ...tool.function } : tool;
  });
}

function toChoice(choice, chat) {
  if (choice === "none" || choice === "required") return choice;
  return chat ? { type: "function", function: { name: choice } } : { type: "function", name: choice };
}

function toFormat({ format, schema }, chat) {
  if (format === "text") return null;
  if (format === "json_object") return { type: "json_object" };
  const of = { name: "answer", schema: parsed("schema", schema), strict: false };
  return chat ? { type: "json_schema", json_schema: of } : { type: "json_schema", ...of };
}

// Returns the tool names for the tool choice; empty while they cannot be parsed.
export function toolNames(text) {
  try {
    return JSON.parse(text).map((tool) => tool?.function?.name ?? tool?.name).filter((name) => typeof name === "string");
  } catch {
    return [];
  }
}
