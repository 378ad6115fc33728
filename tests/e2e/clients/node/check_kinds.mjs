// Every kind of input that the types of the SDKs declare is in `kinds.txt`. Those that the Agents SDK and `ai` convert
// are sent before the newest message: no request is refused, and each kind is read or reported.

import assert from 'node:assert/strict';
import { readFileSync } from 'node:fs';
import test from 'node:test';
import { createAnthropic } from '@ai-sdk/anthropic';
import { createOpenAI } from '@ai-sdk/openai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { Agent, OpenAIProvider, Runner, setTracingDisabled } from '@openai/agents';
import { generateText } from 'ai';
import OpenAI from 'openai';
import { DATA, ID, TypeReader, WORD, readTypes } from './sdk_types.mjs';
import { SCRIPTED, key, play, scripted } from './stage.mjs';

setTracingDisabled(true);
globalThis.AI_SDK_LOG_WARNINGS = false;

// The suites in Python send what the types of OpenAI and Anthropic declare. They have the same kinds.
const SOURCES = {
  'openai input': ['openai/resources/responses/responses', 'ResponseInputItem'],
  'openai messages': ['openai/resources/chat/completions', 'ChatCompletionMessageParam'],
  'anthropic messages': ['@anthropic-ai/sdk/resources/beta/messages/messages', 'BetaContentBlockParam'],
  'agents input': ['@openai/agents', 'AgentInputItem'],
  'ai messages': ['ai', 'ModelMessage'],
};
const { types, checker } = readTypes(SOURCES);
const reader = new TypeReader(checker);
const newest = { role: 'user', content: play('the prompt') };

const exchanges = [];
const baseURL = `${scripted}/v1`;

/** Record what an SDK sends and what the gateway answers. */
async function recorded(url, options) {
  const response = await fetch(url, options);
  exchanges.push({ sent: options.body, status: response.status, answer: await response.clone().json() });
  return response;
}

function textOf({ output, choices, content }) {
  const blocks = output?.find(({ type }) => type === 'message')?.content ?? content;
  return choices ? choices[0].message.content : blocks.find(({ text }) => text !== undefined).text;
}

/** Send messages by a function of an SDK and return what was sent, the prompt, the notes, and an error of the SDK. */
async function send(run, messages) {
  exchanges.length = 0;
  const error = await run(messages).then(() => undefined, (error) => error);
  const [exchange] = exchanges;
  if (!exchange) return { error };
  assert.equal(exchange.status, 200, `${JSON.stringify(exchange.answer)} for ${exchange.sent}`);
  return { error, sent: exchange.sent, prompt: textOf(exchange.answer), notes: exchange.answer.unisono?.notes ?? [] };
}

const agent = new Agent({ name: 'asker', model: SCRIPTED });
const client = new OpenAI({ baseURL, apiKey: key, maxRetries: 0, fetch: recorded });
// Items of a server that stores them would be references.
const providerOptions = { openai: { store: false } };
const converse = (model) => (messages) =>
  generateText({ model, messages, providerOptions, maxRetries: 0, allowSystemInMessages: true });
const settings = { baseURL, apiKey: key, fetch: recorded };
const openai = createOpenAI(settings);
const act = (useResponses) => {
  const runner = new Runner({ modelProvider: new OpenAIProvider({ openAIClient: client, useResponses }) });
  return (input) => runner.run(agent, input);
};
const RUNS = {
  'agents input': { responses: act(true), chat: act(false) },
  'ai messages': {
    responses: converse(openai.responses(SCRIPTED)),
    chat: converse(openai.chat(SCRIPTED)),
    compatible: converse(createOpenAICompatible({ name: 'gateway', ...settings })(SCRIPTED)),
    anthropic: converse(createAnthropic(settings)(SCRIPTED)),
  },
};

/** Different examples of a kind, with the required fields and with all fields. */
function examplesOf(kind) {
  const all = [false, true].flatMap((isFull) => reader.examples(kind, { isFull }));
  return [...new Map(all.map((example) => [JSON.stringify(example), example])).values()];
}

// Items of tools that the Agents SDK does not declare, but carries in `providerData`.
const carried = (name, item) => (providerData) => ({ ...item, id: ID, name, status: 'completed', providerData });
const declared = Object.fromEntries(
  reader.members(types['openai input']).map((kind) => [reader.kindName(kind), examplesOf(kind)]),
);
const HOSTED = [
  'web_search_call', 'file_search_call', 'code_interpreter_call', 'image_generation_call', 'mcp_list_tools', 'mcp_call',
  'mcp_approval_request', 'mcp_approval_response',
];
const EXAMPLES = {
  hosted_tool_call: HOSTED.flatMap((type) => declared[type].map(carried(type, { type: 'hosted_tool_call' }))),
  unknown: declared.custom_tool_call.map(carried('custom_tool_call', { type: 'unknown' })),
};

// Messages around one of a kind that cannot stand alone: before it, after it, and instead of all of them.
const call = { type: 'tool-call', toolCallId: ID, toolName: WORD, input: {} };
const request = { type: 'tool-approval-request', approvalId: ID, toolCallId: ID };
const result = { type: 'tool-result', toolCallId: ID, toolName: WORD, output: { type: 'text', value: 'done' } };
const asked = { role: 'assistant', content: [call] };
const answered = { role: 'tool', content: [result] };
// Two messages of the user would become one, and its media a part of the newest message.
const seen = { role: 'assistant', content: 'Seen.' };
const functionCall = { type: 'function_call', callId: ID, name: WORD, arguments: '{}', status: 'completed' };
const AROUND = {
  function_call_result: [[functionCall], []],
  mcp_approval_response: [[carried('', { type: 'hosted_tool_call' })(declared.mcp_approval_request[0])], []],
  image: [[], [seen]],
  file: [[], [seen]],
  'tool-call': [[], [answered], []],
  'tool-result': [[asked], [], [asked, answered]],
  'tool-approval-request': [[asked], [answered]],
  'tool-approval-response': [[{ role: 'assistant', content: [call, request] }], [answered], [asked, answered]],
};

/** Name of the type of an item, or of the only part of a message. */
function typeOf(item, source) {
  const part = source === 'ai messages' && Array.isArray(item.content) ? item.content.at(-1) : item;
  const type = part.providerData?.type ?? part.type ?? part.role;
  return type === 'tool-result' && item.role === 'assistant' ? `${type} of the provider` : type;
}

/** A message with the call of a tool that the provider ran before its result. */
function completed(item, source) {
  if (!typeOf(item, source).endsWith('of the provider')) return item;
  return { ...item, content: [{ ...call, providerExecuted: true }, ...item.content] };
}

// Kinds that repeat what the request contains already.
const SETTINGS = ['mcp_list_tools', 'mcp_approval_response'];
// Kinds that an SDK refuses or leaves out, with all of their fields.
const LOCAL = ['custom', 'reasoning-file', 'tool-approval-request', 'tool-approval-response'];
const NOT_SENT = {
  'agents input chat': [
    'apply_patch_call', 'apply_patch_call_output', 'code_interpreter_call', 'compaction', 'computer_call',
    'computer_call_result', 'image_generation_call', 'mcp_approval_request', 'mcp_approval_response', 'mcp_call',
    'mcp_list_tools', 'program', 'program_output', 'shell_call', 'shell_call_output', 'tool_search_call',
    'tool_search_output', 'web_search_call',
  ],
  'ai messages responses': [...LOCAL, 'tool-result of the provider'],
  'ai messages chat': [...LOCAL, 'reasoning'],
  'ai messages compatible': LOCAL,
  'ai messages anthropic': [...LOCAL, 'tool-result of the provider'],
};
// Occurrences of the content of an example.
const marks = (text) => text.split(new RegExp(`${WORD}|${DATA}|${ID}`)).length;

for (const [source, runs] of Object.entries(RUNS)) {
  for (const [way, run] of Object.entries(runs)) {
    const seenTypes = new Map();
    for (const kind of reader.members(types[source])) {
      const name = reader.kindName(kind);
      // For Chat Completions, the SDK makes a message without a role of it.
      if (name === 'unknown' && way === 'chat') continue;
      test(`${source}: ${name} is read or reported (${way})`, async () => {
        for (const example of EXAMPLES[name] ?? examplesOf(kind)) {
          const item = completed(example, source);
          const type = typeOf(item, source);
          const [before, after, instead = [...before, ...after]] = AROUND[type] ?? [[], []];
          const found = await send(run, [...before, item, ...after, newest]);
          const without = await send(run, [...instead, newest]);
          const isSent = found.sent !== undefined && marks(found.sent) > marks(without.sent);
          seenTypes.set(type, seenTypes.get(type) || isSent);
          if (!isSent || SETTINGS.includes(type)) continue;
          assert.ok(found.notes.length > without.notes.length || found.prompt !== without.prompt, found.sent);
          assert.equal(found.error, undefined, JSON.stringify(item));
        }
      });
    }
    test(`${source}: all kinds were sent, except those that the SDK never sends (${way})`, () => {
      const missing = [...seenTypes].filter(([, isSent]) => !isSent).map(([type]) => type);
      assert.deepEqual(missing.sort(), [...(NOT_SENT[`${source} ${way}`] ?? [])].sort());
    });
  }
}

test('every kind is known', () => {
  const known = new Set(readFileSync(new URL('kinds.txt', import.meta.url), 'utf8').split('\n'));
  const found = Object.keys(SOURCES).flatMap((source) => reader.kindNames(types[source], source));
  const unknown = [...new Set(found)].filter((kind) => !known.has(kind)).sort();
  assert.deepEqual(unknown, [], 'kinds that kinds.txt does not have; add them after their tests pass');
});
