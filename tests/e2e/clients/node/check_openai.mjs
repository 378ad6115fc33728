// The package `openai`: Chat Completions and Responses, whole and streamed, with its helpers and errors.

import assert from 'node:assert/strict';
import test from 'node:test';
import OpenAI from 'openai';
import { zodResponseFormat, zodTextFormat } from 'openai/helpers/zod';
import { z } from 'zod';
import {
  ANSWER, DEMO, HELLO, PARIS, PLACE, RESULT, SCRIPTED, collect, demo, key, play, rejects, scripted,
} from './stage.mjs';

const connect = (url, apiKey = 'unused') =>
  new OpenAI({ baseURL: `${url}/v1`, apiKey, maxRetries: 0, timeout: 60_000 });
const real = connect(demo);
const played = connect(scripted, key);
const CHAT_TOOL = { type: 'function', function: { name: 'get_weather', parameters: PLACE, strict: true } };
const TOOL = { type: 'function', name: 'get_weather', parameters: PLACE, strict: true };
const Town = z.object({ city: z.string(), degrees: z.number() });
const asked = (text, fields) => ({
  model: DEMO, temperature: 0, messages: [{ role: 'user', content: text }], ...fields,
});

test('a chat answer is the same whole and streamed', async () => {
  const whole = await real.chat.completions.create(asked('Hello!'));
  const streaming = real.chat.completions.stream(asked('Hello!', { stream_options: { include_usage: true } }));
  const streamed = await streaming.finalChatCompletion();
  assert.equal(whole.choices[0].message.content, HELLO);
  assert.equal(streamed.choices[0].message.content, HELLO);
  assert.equal(streamed.choices[0].finish_reason, 'stop');
  assert.equal(streamed.usage.completion_tokens, whole.usage.completion_tokens);
});

test('the stream helper of chat collects calls', async () => {
  const fields = asked(play('two calls'), { model: SCRIPTED, tools: [CHAT_TOOL] });
  const whole = await played.chat.completions.create(fields);
  const streamed = await played.chat.completions.stream(fields).finalChatCompletion();
  for (const { choices: [choice] } of [whole, streamed]) {
    assert.equal(choice.finish_reason, 'tool_calls');
    assert.deepEqual(
      choice.message.tool_calls.map((call) => JSON.parse(call.function.arguments).location), ['Paris', 'Rome'],
    );
  }
});

for (const stream of [false, true]) {
  test(`runTools reaches the final answer (stream: ${stream})`, async () => {
    const places = [];
    const callback = ({ location }) => (places.push(location), RESULT);
    const tool = { ...CHAT_TOOL.function, function: callback, parse: JSON.parse };
    const tools = [{ type: 'function', function: tool }];
    const runner = real.chat.completions.runTools(asked(PARIS, { stream, tools }));
    assert.equal(await runner.finalContent(), ANSWER);
    assert.deepEqual(places, ['Paris']);
  });

  test(`the loop of Responses reaches the final answer (stream: ${stream})`, async () => {
    const respond = (fields) => {
      const body = { model: DEMO, temperature: 0, tools: [TOOL], ...fields };
      return stream ? real.responses.stream(body).finalResponse() : real.responses.create(body);
    };
    for (const isStored of [true, false]) {
      const first = await respond({ input: PARIS, store: isStored });
      const call = first.output.at(-1);
      assert.deepEqual([call.type, JSON.parse(call.arguments)], ['function_call', { location: 'Paris' }]);
      const result = { type: 'function_call_output', call_id: call.call_id, output: RESULT };
      const second = isStored
        ? await respond({ previous_response_id: first.id, input: [result] })
        : await respond({ store: false, input: [{ role: 'user', content: PARIS }, ...first.output, result] });
      assert.equal(second.output_text, ANSWER);
      assert.equal(second.status, 'completed');
    }
  });
}

test('events of a response are in order, and the helper reads a stored stream', async () => {
  const body = { model: DEMO, temperature: 0, input: 'Hello!', background: true };
  const events = await collect(await real.responses.create({ ...body, stream: true }));
  assert.deepEqual(events.map((event) => event.sequence_number), events.map((_, index) => index));
  assert.equal(events.at(-1).type, 'response.completed');
  const streaming = real.responses.stream({ response_id: events[0].response.id, starting_after: 2 });
  assert.equal((await streaming.finalResponse()).output_text, HELLO);
});

test('structured output is parsed', async () => {
  const fields = asked('Hello!', { response_format: zodResponseFormat(Town, 'town') });
  const completion = await real.chat.completions.parse(fields);
  assert.equal(typeof completion.choices[0].message.parsed.city, 'string');
  const body = { model: DEMO, temperature: 0, input: 'Hello!', text: { format: zodTextFormat(Town, 'town') } };
  assert.equal(typeof (await real.responses.parse(body)).output_parsed.degrees, 'number');
  assert.equal(typeof (await real.responses.stream(body).finalResponse()).output_parsed.degrees, 'number');
});

test('conversations, items and pages', async () => {
  const conversation = await real.conversations.create({ items: [{ type: 'message', role: 'user', content: 'ping' }] });
  await real.responses.create({ model: DEMO, temperature: 0, input: 'Hello!', conversation: conversation.id });
  const items = await collect(real.conversations.items.list(conversation.id, { limit: 1, order: 'asc' }));
  assert.deepEqual(items.map((item) => item.type), ['message', 'message', 'reasoning', 'message']);
  assert.ok((await collect(real.models.list())).some((model) => model.id === DEMO));
});

// Case: [client, call, class, fields of the error].
const answer = { model: SCRIPTED, input: play('an answer') };
const ERRORS = {
  'a value out of range': [
    played, (client) => client.responses.create({ ...answer, temperature: 9 }),
    OpenAI.BadRequestError, { status: 400, param: 'temperature', code: 'invalid_value', type: 'invalid_request_error' },
  ],
  'a wrong key': [
    connect(scripted, 'sk-wrong'), (client) => client.responses.create(answer),
    OpenAI.AuthenticationError, { status: 401, code: 'invalid_api_key' },
  ],
  'an unknown model': [
    played, (client) => client.chat.completions.create(asked('x', { model: 'gpt-9' })),
    OpenAI.NotFoundError, { status: 404, code: 'model_not_found' },
  ],
  'an unknown response': [
    played, (client) => client.responses.retrieve('resp_none'), OpenAI.NotFoundError, { status: 404 },
  ],
  'a busy backend': [
    played, (client) => client.responses.create({ ...answer, input: play('busy') }),
    OpenAI.InternalServerError, { status: 503, code: 'backend_overloaded' },
  ],
  'a broken backend': [
    played, (client) => client.responses.create({ ...answer, input: play('broken') }),
    OpenAI.InternalServerError, { code: 'backend_error' },
  ],
};

for (const [name, [client, call, kind, fields]] of Object.entries(ERRORS)) {
  test(`error: ${name}`, async () => {
    const error = await rejects(call(client), kind, fields);
    assert.match(error.requestID, /^req_/);
  });
}

test('a stream that breaks raises an error after its first words', async () => {
  const chat = await played.chat.completions.create(asked(play('a reset later'), { model: SCRIPTED, stream: true }));
  await rejects(collect(chat), OpenAI.APIError, { code: 'backend_protocol_error' });
  const stream = await played.responses.create({ ...answer, input: play('a reset later'), stream: true });
  await rejects(collect(stream), OpenAI.APIError, { code: 'backend_protocol_error' });
});
