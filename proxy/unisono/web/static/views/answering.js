// Reads answers of each API, streamed or whole, and adds them to a transcript as growing parts.
//
// A transcript has two methods. `part(key, kind, title)` returns the part with this key, which is created if necessary;
// a part has `add(text)` and `set(text)`. `about({...})` stores facts about the whole answer.

// Chat Completions and raw completions differ only in the content of a choice, which `read` adds.
function choicesEvent(read) {
  return (event, transcript) => {
    if (event.error) throw new Error(String(event.error.message ?? "The stream failed."));
    for (const choice of event.choices ?? []) {
      read(choice, ofChoice(choice, transcript));
      if (choice.finish_reason && !choice.index) transcript.about({ finish: choice.finish_reason });
    }
    if (event.usage) transcript.about({ usage: chatUsage(event.usage) });
    if (event.unisono) transcript.about({ unisono: event.unisono });
  };
}

function choicesAnswer(read) {
  return (body, transcript) => {
    for (const choice of body.choices) read(choice, ofChoice(choice, transcript));
    transcript.about({ finish: body.choices[0].finish_reason, usage: chatUsage(body.usage), unisono: body.unisono });
  };
}

// Returns the transcript for the parts of a choice. With `n`, each choice has parts of its own.
function ofChoice({ index }, transcript) {
  if (!index) return transcript;
  const part = (key, kind, title) =>
    Object.assign(transcript.part(`${key} of choice ${index}`, kind, `${title} (choice ${index + 1})`), { choice: index });
  return { part };
}

function chatParts(said, transcript, how) {
  const thought = said.reasoning ?? said.reasoning_content;
  if (thought) transcript.part("reasoning", "analysis", "Reasoning")[how](thought);
  for (const [at, call] of (said.tool_calls ?? []).entries()) {
    const of = call.function ?? {};
    const part = transcript.part(`call ${call.index ?? at}`, "call", "Tool call");
    if (of.name) part.named(of.name, call.id);
    if (of.arguments) part[how](of.arguments);
  }
  if (said.content) transcript.part("answer", "final", "Answer")[how](said.content);
  if (said.refusal) transcript.part("refusal", "refusal", "Refusal")[how](said.refusal);
}

function chatUsage(usage) {
  return {
    input: usage.prompt_tokens,
    cached: usage.prompt_tokens_details?.cached_tokens,
    output: usage.completion_tokens,
    reasoning: usage.completion_tokens_details?.reasoning_tokens,
  };
}

const DELTAS = new Set([
  "response.output_text.delta",
  "response.reasoning_text.delta",
  "response.refusal.delta",
  "response.function_call_arguments.delta",
  "response.custom_tool_call_input.delta",
  "response.mcp_call_arguments.delta",
]);
const ENDS = new Set(["response.completed", "response.incomplete", "response.failed"]);

function responsesEvent(event, transcript) {
  if (event.type === "error") throw new Error(String(event.message ?? event.error?.message ?? "The stream failed."));
  const key = `item ${event.output_index}`;
  if (event.type === "response.output_item.added") begun(event.item, key, transcript);
  else if (DELTAS.has(event.type)) transcript.part(key, "final", "Answer").add(event.delta);
  else if (event.type === "response.output_item.done") whole(event.item, key, transcript);
  else if (ENDS.has(event.type)) ended(event.response, transcript);
}

function responsesAnswer(response, transcript) {
  for (const [at, item] of response.output.entries()) {
    begun(item, `item ${at}`, transcript);
    whole(item, `item ${at}`, transcript);
  }
  ended(response, transcript);
}

function begun(item, key, transcript) {
  switch (item.type) {
    case "reasoning":
      return transcript.part(key, "analysis", "Reasoning");
    case "message":
      return item.phase === "commentary"
        ? transcript.part(key, "commentary", "Preamble")
        : transcript.part(key, "final", "Answer");
    case "function_call":
    case "custom_tool_call": {
      const part = transcript.part(key, "call", "Tool call");
      part.named(item.name, item.call_id);
      return part;
    }
    case "mcp_approval_request": {
      const part = transcript.part(key, "approval", "Approval");
      part.titled("Approval needed for", `${item.server_label}.${item.name}`);
      part.approval = item.id;
      return part;
    }
    case "mcp_list_tools":
      return transcript.part(key, "tool", `Tools of ${item.server_label}`);
    case "mcp_call": {
      const part = transcript.part(key, "tool", "Server tool");
      part.titled("Server tool", `${item.server_label}.${item.name}`);
      return part;
    }
    default:
      return transcript.part(key, "tool", String(item.type).replaceAll("_", " "));
  }
}

function whole(item, key, transcript) {
  const part = begun(item, key, transcript);
  if (item.type === "reasoning") part.set(texts(item.content));
  else if (item.type === "message") part.set(texts(item.content));
  else if (item.type === "function_call") part.set(item.arguments);
  else if (item.type === "custom_tool_call") part.set(item.input);
  else if (item.type === "mcp_approval_request") part.set(item.arguments ?? "");
  else if (item.type === "mcp_list_tools" && !item.error) part.set((item.tools ?? []).map((tool) => tool.name).join("\n"));
  else if (item.type === "mcp_call") part.set(`${item.arguments}\n→ ${item.output ?? said(item.error)}`);
  else part.set(JSON.stringify(item, null, 2));
}

const said = (error) => (error ? `failed: ${texts(error.content) || error.message || JSON.stringify(error)}` : "no result");

const texts = (parts) => (parts ?? []).map((part) => part.text ?? part.refusal ?? "").join("");

function ended(response, transcript) {
  const usage = response.usage;
  transcript.items = response.output;
  transcript.about({
    finish: response.incomplete_details?.reason ?? response.status,
    unisono: response.unisono,
    usage: usage && {
      input: usage.input_tokens,
      cached: usage.input_tokens_details?.cached_tokens,
      output: usage.output_tokens,
      reasoning: usage.output_tokens_details?.reasoning_tokens,
    },
  });
  if (response.error) throw new Error(String(response.error.message));
}

// -- Messages

function messagesEvent(event, transcript) {
  if (event.type === "error") throw new Error(String(event.error?.message ?? "The stream failed."));
  // The number of output tokens is known only at the end.
  if (event.type === "message_start") messagesUsage({ ...event.message.usage, output_tokens: undefined }, transcript);
  else if (event.type === "content_block_start") startBlock(event.content_block, `block ${event.index}`, transcript, event.index);
  else if (event.type === "content_block_delta") growBlock(event.delta, event.index, transcript);
  else if (event.type === "message_delta") {
    transcript.about({ finish: event.delta.stop_reason });
    if (event.unisono) transcript.about({ unisono: event.unisono });
    messagesUsage(event.usage, transcript);
  }
}

function messagesAnswer(body, transcript) {
  for (const [at, block] of body.content.entries()) startBlock(block, `block ${at}`, transcript, at);
  transcript.about({ finish: body.stop_reason, unisono: body.unisono });
  messagesUsage(body.usage, transcript);
}

// The next request sends the blocks back unchanged, including their signatures.
function startBlock(block, key, transcript, at) {
  const kinds = { thinking: ["analysis", "Reasoning"], text: ["final", "Answer"], tool_use: ["call", "Tool call"] };
  const [kind, title] = kinds[block.type] ?? ["tool", String(block.type).replaceAll("_", " ")];
  transcript.blocks ??= [];
  transcript.blocks[at] = structuredClone(block);
  const part = transcript.part(key, kind, title);
  if (block.type === "tool_use") {
    part.named(block.name, block.id);
    if (Object.keys(block.input ?? {}).length) part.set(JSON.stringify(block.input));
  } else if (kind === "tool") part.set(JSON.stringify(block, null, 2));
  else if (block.thinking || block.text) part.set(block.thinking ?? block.text);
}

function growBlock(delta, at, transcript) {
  const part = transcript.parts.get(`block ${at}`);
  const block = transcript.blocks[at];
  if (delta.type === "signature_delta") block.signature = (block.signature ?? "") + delta.signature;
  const text = delta.text ?? delta.thinking ?? delta.partial_json;
  if (!text) return;
  part.add(text);
  if (delta.text) block.text += text;
  else if (delta.thinking) block.thinking += text;
  else block.json = (block.json ?? "") + text;
}

function messagesUsage(usage, transcript) {
  if (!usage) return;
  const had = transcript.known.usage ?? {};
  transcript.about({ usage: { ...had, input: usage.input_tokens ?? had.input, cached: usage.cache_read_input_tokens ?? had.cached, output: usage.output_tokens ?? had.output } });
}

// -- raw completions

function rawText(choice, transcript, how) {
  if (choice.text) transcript.part("text", "raw", "Raw output")[how](choice.text);
}

export const STREAMED = {
  chat: choicesEvent((choice, transcript) => chatParts(choice.delta ?? {}, transcript, "add")),
  responses: responsesEvent,
  messages: messagesEvent,
  completions: choicesEvent((choice, transcript) => rawText(choice, transcript, "add")),
};
export const WHOLE = {
  chat: choicesAnswer((choice, transcript) => chatParts(choice.message, transcript, "set")),
  responses: responsesAnswer,
  messages: messagesAnswer,
  completions: choicesAnswer((choice, transcript) => rawText(choice, transcript, "set")),
};
