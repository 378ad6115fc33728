// The package `@anthropic-ai/sdk`: messages, whole and streamed, with its helpers and errors.

import assert from 'node:assert/strict';
import test from 'node:test';
import Anthropic from '@anthropic-ai/sdk';
import { betaZodTool } from '@anthropic-ai/sdk/helpers/beta/zod';
import { zodOutputFormat } from '@anthropic-ai/sdk/helpers/zod';
import { z } from 'zod';
import {
  ANSWER, DEMO, HELLO, PARIS, PLACE, RESULT, SCRIPTED, collect, demo, key, play, rejects, scripted,
} from './stage.mjs';

const connect = (baseURL, apiKey = 'unused') => new Anthropic({ baseURL, apiKey, maxRetries: 0, timeout: 60_000 });
const real = connect(demo);
const played = connect(scripted, key);
const TOOL = { name: 'get_weather', description: 'Gets the current weather in a city.', input_schema: PLACE };
const THINKING = { type: 'adaptive' };
const asked = (text, fields) => ({
  model: DEMO, max_tokens: 2000, temperature: 0, messages: [{ role: 'user', content: text }], ...fields,
});
const textOf = (message) => message.content.filter(({ type }) => type === 'text').map(({ text }) => text).join('');

for (const stream of [false, true]) {
  const create = (client, fields) =>
    stream ? client.messages.stream(fields).finalMessage() : client.messages.create(fields);

  test(`an answer has text and usage (stream: ${stream})`, async () => {
    const message = await create(real, asked('Hello!'));
    assert.deepEqual([textOf(message), message.stop_reason], [HELLO, 'end_turn']);
    assert.ok(message.usage.output_tokens > 0);
  });

  for (const thinking of [undefined, THINKING]) {
    test(`the loop reaches the final answer (stream: ${stream}, thinking: ${thinking?.type})`, async () => {
      const fields = asked(PARIS, { tools: [TOOL], ...(thinking && { thinking }) });
      const first = await create(real, fields);
      const call = first.content.at(-1);
      assert.deepEqual([first.stop_reason, call.type, call.input], ['tool_use', 'tool_use', { location: 'Paris' }]);
      const result = { type: 'tool_result', tool_use_id: call.id, content: RESULT };
      fields.messages.push({ role: 'assistant', content: first.content }, { role: 'user', content: [result] });
      assert.equal(textOf(await create(real, fields)), ANSWER);
    });
  }

  test(`the tool runner reaches the final answer (stream: ${stream})`, async () => {
    const places = [];
    const tool = betaZodTool({
      name: 'get_weather',
      description: TOOL.description,
      inputSchema: z.object({ location: z.string() }),
      run: ({ location }) => (places.push(location), RESULT),
    });
    const runner = real.beta.messages.toolRunner(asked(PARIS, { tools: [tool], stream }));
    assert.equal(textOf(await runner.runUntilDone()), ANSWER);
    assert.deepEqual(places, ['Paris']);
  });
}

test('a stream has the events of the helper', async () => {
  const fields = { model: SCRIPTED, tools: [TOOL], thinking: THINKING };
  const streaming = played.messages.stream(asked(play('a preamble'), fields));
  const seen = { text: '', thinking: '', inputJson: '', signature: 0 };
  streaming.on('text', (delta) => { seen.text += delta; });
  streaming.on('thinking', (delta) => { seen.thinking += delta; });
  streaming.on('inputJson', (delta) => { seen.inputJson += delta; });
  streaming.on('signature', () => { seen.signature += 1; });
  const message = await streaming.finalMessage();
  assert.deepEqual(message.content.map(({ type }) => type), ['thinking', 'text', 'tool_use']);
  assert.equal(seen.thinking, message.content[0].thinking);
  assert.equal(seen.text, message.content[1].text);
  assert.deepEqual(JSON.parse(seen.inputJson), message.content[2].input);
  assert.equal(seen.signature, 1);
});

test('structured output is parsed', async () => {
  const format = zodOutputFormat(z.object({ city: z.string(), degrees: z.number() }));
  const message = await real.messages.parse(asked('Hello!', { output_config: { format } }));
  assert.equal(typeof message.parsed_output.city, 'string');
});

test('tokens are counted and models are listed', async () => {
  const { messages } = asked('Hello!');
  assert.ok((await real.messages.countTokens({ model: DEMO, messages })).input_tokens > 0);
  assert.ok((await collect(real.models.list())).some(({ id }) => id === DEMO));
});

// Case: [client, fields, class, status, type of the error].
const fails = (name) => asked(play(name), { model: SCRIPTED });
const ERRORS = {
  'a value out of range': [played, { temperature: 9 }, Anthropic.BadRequestError, 400, 'invalid_request_error'],
  'a wrong key': [connect(scripted, 'sk-wrong'), {}, Anthropic.AuthenticationError, 401, 'authentication_error'],
  'an unknown model': [played, { model: 'claude-9' }, Anthropic.NotFoundError, 404, 'not_found_error'],
  'a busy backend': [played, fails('busy'), Anthropic.ServiceUnavailableError, 503, 'overloaded_error'],
  'a broken backend': [played, fails('broken'), Anthropic.InternalServerError, 502, 'api_error'],
};

for (const [name, [client, fields, kind, status, type]] of Object.entries(ERRORS)) {
  test(`error: ${name}`, async () => {
    const call = client.messages.create(asked(play('an answer'), { model: SCRIPTED, ...fields }));
    const error = await rejects(call, kind, { status, type });
    assert.equal(error.error.type, 'error');
    assert.match(error.requestID, /^req_/);
  });
}

test('a stream that breaks raises an error', async () => {
  const stream = await played.messages.create(asked(play('a reset later'), { model: SCRIPTED, stream: true }));
  await rejects(collect(stream), Anthropic.APIError, { type: 'api_error' });
});
