// The package `@openai/agents`: loops, handoffs, structured output, sessions and tools with their own items.

import assert from 'node:assert/strict';
import test from 'node:test';
import {
  Agent, MemorySession, OpenAIConversationsSession, OpenAIProvider, Runner, applyPatchTool, setTracingDisabled,
  shellTool, tool,
} from '@openai/agents';
import OpenAI from 'openai';
import { z } from 'zod';
import { ANSWER, DEMO, HELLO, PARIS, RESULT, SAID, SCRIPTED, collect, demo, key, play, scripted } from './stage.mjs';

// The SDK would send its traces to OpenAI.
setTracingDisabled(true);

const connect = (url, apiKey = 'unused') =>
  new OpenAI({ baseURL: `${url}/v1`, apiKey, maxRetries: 0, timeout: 60_000 });
const real = connect(demo);
const APIS = { responses: true, chat: false };
const providers = (useResponses) => ({
  [DEMO]: new OpenAIProvider({ openAIClient: real, useResponses }),
  [SCRIPTED]: new OpenAIProvider({ openAIClient: connect(scripted, key), useResponses }),
});
const Town = z.object({ city: z.string(), degrees: z.number() });

function agentOf(model, fields) {
  return new Agent({ name: 'asker', model, modelSettings: { temperature: 0 }, ...fields });
}

function weather() {
  const places = [];
  const execute = ({ location }) => (places.push(location), RESULT);
  const parameters = z.object({ location: z.string() });
  return { places, tool: tool({ name: 'get_weather', description: 'Gets the weather.', parameters, execute }) };
}

/** Run an agent, whole or streamed, and return its result and the names of its items. */
async function perform(agent, input, { useResponses = true, stream = false, ...options } = {}) {
  const runner = new Runner({ modelProvider: providers(useResponses)[agent.model] });
  const result = await runner.run(agent, input, { stream, ...options });
  if (!stream) return { result, names: result.newItems.map((item) => item.type), text: '' };
  const events = await collect(result);
  await result.completed;
  const names = events.filter(({ type }) => type === 'run_item_stream_event').map(({ name }) => name);
  const raw = events.filter(({ type }) => type === 'raw_model_stream_event').map(({ data }) => data);
  const deltas = raw.filter(({ type }) => type === 'output_text_delta').map(({ delta }) => delta);
  return { result, names, text: deltas.join('') };
}

for (const [api, useResponses] of Object.entries(APIS)) {
  for (const stream of [false, true]) {
    const how = { useResponses, stream };
    const label = `(${api}, stream: ${stream})`;

    test(`the loop reaches the final answer, and further turns follow ${label}`, async () => {
      const { places, tool } = weather();
      const agent = agentOf(DEMO, { tools: [tool] });
      const first = await perform(agent, PARIS, how);
      assert.deepEqual([places, first.result.finalOutput], [['Paris'], ANSWER]);
      assert.ok(first.names.includes(stream ? 'tool_output' : 'tool_call_output_item'), first.names);
      if (stream) assert.ok(first.text.endsWith(ANSWER));
      const turn = [...first.result.history, { role: 'user', content: 'ping' }];
      const second = await perform(agent, turn, how);
      const third = await perform(agent, [...second.result.history, { role: 'user', content: PARIS }], how);
      const [tokens, more] = [first, third].map(({ result }) => result.rawResponses[0].usage.inputTokens);
      assert.ok(third.result.finalOutput.length > 0 && more > tokens);
    });

    test(`parallel calls are executed ${label}`, async () => {
      const { places, tool } = weather();
      const { result } = await perform(agentOf(SCRIPTED, { tools: [tool] }), play('two calls', 'an answer'), how);
      assert.deepEqual([places.sort(), result.finalOutput], [['Paris', 'Rome'], SAID]);
    });

    test(`a handoff runs the other agent ${label}`, async () => {
      const poet = agentOf(SCRIPTED, { name: 'poet', instructions: 'Rhyme.' });
      const front = agentOf(SCRIPTED, { handoffs: [poet] });
      const { result } = await perform(front, play('a handoff', 'an answer'), how);
      assert.deepEqual([result.lastAgent.name, result.finalOutput], ['poet', SAID]);
    });

    test(`structured output is parsed ${label}`, async () => {
      const { result } = await perform(agentOf(DEMO, { outputType: Town }), 'Hello!', how);
      assert.equal(typeof result.finalOutput.degrees, 'number');
    });

    test(`a session sends its items back ${label}`, async () => {
      const session = new MemorySession();
      const { tool } = weather();
      const agent = agentOf(DEMO, { tools: [tool] });
      assert.equal((await perform(agent, PARIS, { ...how, session })).result.finalOutput, ANSWER);
      assert.equal(typeof (await perform(agent, 'Hello!', { ...how, session })).result.finalOutput, 'string');
      assert.ok((await session.getItems()).length >= 6);
    });

    test(`a failure of the backend is the error of its class ${label}`, async () => {
      await assert.rejects(perform(agentOf(SCRIPTED), play('broken'), how), OpenAI.InternalServerError);
    });
  }
}

for (const stream of [false, true]) {
  test(`runs are chained by previous_response_id (stream: ${stream})`, async () => {
    const { places, tool } = weather();
    const agent = agentOf(DEMO, { tools: [tool] });
    const first = await perform(agent, 'Hello!', { stream });
    const previousResponseId = first.result.lastResponseId;
    const second = await perform(agent, PARIS, { stream, previousResponseId });
    assert.equal(first.result.finalOutput, HELLO);
    assert.deepEqual([places, second.result.finalOutput], [['Paris'], ANSWER]);
    const { rawResponses } = second.result;
    const stored = await Promise.all(rawResponses.map(({ responseId }) => real.responses.retrieve(responseId)));
    assert.deepEqual(
      stored.map((response) => response.previous_response_id), [previousResponseId, rawResponses[0].responseId],
    );
  });

  test(`a conversation stores the items of its runs (stream: ${stream})`, async () => {
    const { tool } = weather();
    const session = new OpenAIConversationsSession({ client: real });
    const agent = agentOf(DEMO, { tools: [tool] });
    await perform(agent, PARIS, { stream, session });
    await perform(agent, 'Hello!', { stream, session });
    const types = (await session.getItems()).map(({ type }) => type);
    assert.deepEqual(types.slice(0, 7), [
      'message', 'reasoning', 'function_call', 'function_call_result', 'reasoning', 'message', 'message',
    ]);
    await session.clearSession();
    const { id } = await real.conversations.create();
    const { result } = await perform(agent, PARIS, { stream, conversationId: id });
    assert.equal(result.finalOutput, ANSWER);
    assert.equal((await collect(real.conversations.items.list(id))).length, 6);
  });

  test(`shell and apply_patch are run by the client (stream: ${stream})`, async () => {
    const done = [];
    const output = { stdout: 'a.py', stderr: '', outcome: { type: 'exit', exitCode: 0 } };
    const shell = shellTool({ shell: { run: async ({ commands }) => (done.push(commands), { output: [output] }) } });
    const write = async (operation) => (done.push(operation), { status: 'completed', output: 'done' });
    const patch = applyPatchTool({ editor: { createFile: write, updateFile: write, deleteFile: write } });
    const agent = agentOf(SCRIPTED, { tools: [shell, patch] });
    const first = await perform(agent, play('a shell', 'an answer'), { stream });
    // All items go back as input.
    const input = [...first.result.history, { role: 'user', content: play('a patch', 'an answer') }];
    const { result } = await perform(agent, input, { stream });
    assert.deepEqual([first.result.finalOutput, result.finalOutput], [SAID, SAID]);
    assert.deepEqual(done, [['ls', 'pwd'], { type: 'create_file', path: 'a.py', diff: '+1' }]);
    assert.deepEqual(
      result.history.map(({ type }) => type).filter((type) => /shell|patch/.test(type)),
      ['shell_call', 'shell_call_output', 'apply_patch_call', 'apply_patch_call_output'],
    );
  });
}

test('repeated calls stop at maxTurns', async () => {
  const { places, tool } = weather();
  const running = perform(agentOf(SCRIPTED, { tools: [tool] }), play('two calls'), { maxTurns: 3 });
  await assert.rejects(running, { name: 'MaxTurnsExceededError' });
  assert.equal(places.length, 6);
});

test('responses over WebSocket', async () => {
  const { places, tool } = weather();
  const modelProvider = new OpenAIProvider({ openAIClient: real, useResponses: true, useResponsesWebSocket: true });
  const runner = new Runner({ modelProvider });
  const result = await runner.run(agentOf(DEMO, { tools: [tool] }), PARIS, { stream: true });
  await collect(result);
  assert.deepEqual([places, result.finalOutput], [['Paris'], ANSWER]);
  await modelProvider.close();
});
