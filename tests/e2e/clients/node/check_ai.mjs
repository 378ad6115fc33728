// Vercel's package `ai` with its providers for OpenAI (Responses, Chat), compatible servers and Anthropic.

import assert from 'node:assert/strict';
import test from 'node:test';
import { createAnthropic } from '@ai-sdk/anthropic';
import { createOpenAI } from '@ai-sdk/openai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { APICallError, Output, generateObject, generateText, isStepCount, streamObject, streamText, tool } from 'ai';
import { z } from 'zod';
import { ANSWER, DEMO, HELLO, PARIS, RESULT, SAID, SCRIPTED, collect, demo, key, play, scripted } from './stage.mjs';

// Warnings about temperatures and unknown models.
globalThis.AI_SDK_LOG_WARNINGS = false;

const settings = (url, apiKey) => ({ baseURL: `${url}/v1`, apiKey });
const connect = (url, apiKey = 'unused') => {
  const openai = createOpenAI(settings(url, apiKey));
  return {
    responses: openai.responses,
    chat: openai.chat,
    compatible: createOpenAICompatible({
      name: 'gateway', supportsStructuredOutputs: true, includeUsage: true, ...settings(url, apiKey),
    }),
    anthropic: createAnthropic(settings(url, apiKey)),
  };
};
const clients = { [DEMO]: connect(demo), [SCRIPTED]: connect(scripted, key) };
const Town = z.object({ city: z.string(), degrees: z.number() });
// Options with which each provider returns reasoning.
const OPTIONS = {
  responses: { openai: { forceReasoning: true, reasoningSummary: 'auto' } },
  'responses, not stored': {
    openai: { forceReasoning: true, reasoningSummary: 'auto', store: false, include: ['reasoning.encrypted_content'] },
  },
  chat: {},
  compatible: {},
  anthropic: { anthropic: { thinking: { type: 'adaptive' } } },
};
const HAS_REASONING = ['responses', 'responses, not stored', 'compatible', 'anthropic'];

function weather() {
  const places = [];
  const execute = ({ location }) => (places.push(location), RESULT);
  const inputSchema = z.object({ location: z.string() });
  return { places, tools: { get_weather: tool({ description: 'Gets the weather.', inputSchema, execute }) } };
}

/** Generate text, whole or streamed; a streamed result has the same fields after it has been read. */
async function generate(stream, fields) {
  const body = { maxRetries: 0, temperature: 0, ...fields };
  if (!stream) return generateText(body);
  const result = streamText({ ...body, onError: () => {} });
  const parts = await collect(result.fullStream);
  const failed = parts.find(({ type }) => type === 'error');
  if (failed) throw failed.error;
  const names = ['text', 'steps', 'finishReason', 'usage', 'responseMessages'];
  const values = await Promise.all(names.map((name) => result[name]));
  const output = body.output && (await result.output);
  return { ...Object.fromEntries(names.map((name, index) => [name, values[index]])), output };
}

for (const [way, providerOptions] of Object.entries(OPTIONS)) {
  const model = (name) => clients[name][way.split(',')[0]](name);

  for (const stream of [false, true]) {
    const label = `(${way}, stream: ${stream})`;

    test(`steps with tools, and a further turn with the messages sent back ${label}`, async () => {
      const { places, tools } = weather();
      const fields = { model: model(DEMO), tools, providerOptions, stopWhen: isStepCount(5) };
      const messages = [{ role: 'user', content: PARIS }];
      const first = await generate(stream, { ...fields, messages });
      assert.deepEqual([places, first.text, first.steps.length], [['Paris'], ANSWER, 2]);
      assert.equal(first.finishReason, 'stop');
      assert.equal(Boolean(first.steps[0].reasoningText), HAS_REASONING.includes(way), 'reasoning');
      if (HAS_REASONING.includes(way)) {
        // The second prompt continues the generated tokens, with their reasoning.
        const [{ usage }, next] = first.steps;
        assert.ok(next.usage.inputTokenDetails.cacheReadTokens >= usage.totalTokens - 8, JSON.stringify(next.usage));
      }
      messages.push(...first.responseMessages, { role: 'user', content: 'Hello!' });
      const second = await generate(stream, { ...fields, messages });
      assert.ok(second.text.length > 0);
      assert.ok(second.usage.inputTokens > first.steps[0].usage.inputTokens);
    });

    test(`parallel calls ${label}`, async () => {
      const { places, tools } = weather();
      const fields = { model: model(SCRIPTED), tools, providerOptions, stopWhen: isStepCount(5) };
      const result = await generate(stream, { ...fields, prompt: play('two calls', 'an answer') });
      assert.deepEqual([places, result.text], [['Paris', 'Rome'], SAID]);
    });

    test(`structured output ${label}`, async () => {
      const output = Output.object({ schema: Town });
      const result = await generate(stream, { model: model(DEMO), prompt: 'Hello!', output, providerOptions });
      assert.equal(typeof result.output.city, 'string');
    });

    test(`a refused request is an APICallError ${label}`, async () => {
      const running = generate(stream, { model: model(SCRIPTED), prompt: play('rejected'), providerOptions });
      await assert.rejects(running, (error) => APICallError.isInstance(error) && error.statusCode === 400);
    });
  }

  test(`objects, whole and streamed (${way})`, async () => {
    const fields = { model: model(DEMO), prompt: 'Hello!', schema: Town, temperature: 0, maxRetries: 0 };
    assert.equal(typeof (await generateObject(fields)).object.degrees, 'number');
    const streaming = streamObject(fields);
    await collect(streaming.partialObjectStream);
    assert.equal(typeof (await streaming.object).degrees, 'number');
  });

  test(`a forced tool, and a text without a tool (${way})`, async () => {
    const { tools } = weather();
    const fields = { model: model(DEMO), prompt: 'Hello!', tools, temperature: 0, maxRetries: 0 };
    const forced = await generateText({ ...fields, toolChoice: { type: 'tool', toolName: 'get_weather' } });
    assert.deepEqual(forced.toolCalls.map(({ toolName }) => toolName), ['get_weather']);
    assert.equal((await generateText({ ...fields, toolChoice: 'none' })).text, HELLO);
  });
}
