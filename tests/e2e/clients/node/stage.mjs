// Addresses of the gateways, and the prompts and answers that all programs share.

import assert from 'node:assert/strict';

export const { demo, scripted, key } = JSON.parse(process.env.STAGE);

export const HELLO = 'Hello! How can I help you today?';
export const PARIS = 'What is the weather in Paris?';
export const ANSWER = 'It is sunny in Paris with 18 degrees.';
export const SAID = 'Here is the answer.';
export const RESULT = '18 degrees, sunny';

export const DEMO = 'gpt-oss-demo';
export const SCRIPTED = 'scripted';
export const play = (...names) => `script: ${names.join(', then: ')}`;

/** JSON schema of the arguments of `get_weather`. */
export const PLACE = {
  type: 'object',
  properties: { location: { type: 'string', description: 'City name' } },
  required: ['location'],
  additionalProperties: false,
};

export async function collect(stream) {
  const events = [];
  for await (const event of stream) events.push(event);
  return events;
}

/** Assert that a promise is rejected by an error of a class with the given fields. */
export async function rejects(promise, kind, fields) {
  const error = await promise.then(() => assert.fail('no error'), (error) => error);
  assert.ok(error instanceof kind, `${error.constructor.name} instead of ${kind.name}: ${error.message}`);
  for (const [field, value] of Object.entries(fields)) assert.deepEqual(error[field], value, field);
  return error;
}
