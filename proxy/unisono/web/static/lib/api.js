// Client of the gateway's API. The key is stored in this module, optionally in the tab's session storage, and sent in
// the Authorization header; never in a URL.

const KEPT = "unisono.key";
// Beginning of a comment with tokens in a stream.
const TOKENS = ": tokens ";
// Characters that a key can have. Browsers refuse to send some other characters in a header.
const SENDABLE = /^[!-~]*$/;
let key = kept();
let ask = async () => false;
let onContact = () => {};
// Functions that resume requests that wait until the gateway can be reached.
const waiting = [];
// Maximum number of times that a request is sent again.
const MAX_REPEATS = 3;

function kept() {
  try {
    return sessionStorage.getItem(KEPT) ?? "";
  } catch {
    return "";
  }
}

export function hasKey() {
  return key !== "";
}

export function useKey(given, keep) {
  key = given;
  try {
    if (key && keep) sessionStorage.setItem(KEPT, key);
    else sessionStorage.removeItem(KEPT);
  } catch {
    // Storage failed: the key stays in memory.
  }
}

// Sets the function that asks for a key after a refusal. It is called with the reason and returns true if a new key was
// entered.
export function whenRefused(asking) {
  ask = asking;
}

// Sets the function that is called after each request, with true if the gateway answered.
export function whenContacted(contact) {
  onContact = contact;
}

export class Refused extends Error {
  constructor(status, message, code, param, again) {
    super(message);
    this.status = status;
    this.code = code;
    this.param = param;
    this.again = again;
  }
}

class Unreachable extends Error {}

// Describes an error and a possible remedy.
export function reason(error) {
  if (!(error instanceof Refused)) return error.message;
  const field = error.param && `Field: ${error.param}.`;
  const code = error.code && `(${error.code})`;
  const todo = error.status === 401 ? "Sign in with another key." : error.again && `Try again in ${error.again} s.`;
  return [error.message, field, code, todo].filter(Boolean).join(" ");
}

// Sends a request; with a `body` it is a POST. `quiet` requests never ask for a key. `onSend` is called before the
// request is sent, and again before it is sent with a new key. A request with `reads` changes nothing: if the gateway
// cannot be reached, the request waits, and is sent again when the gateway answers.
export async function asked(path, { body, signal, quiet, reads = body === undefined, headers = {}, onSend = () => {} } = {}) {
  for (let repeats = 0; ; ) {
    onSend();
    let answer = null;
    try {
      if (SENDABLE.test(key)) answer = await sent(path, body, signal, headers);
    } catch (error) {
      if (!(error instanceof Unreachable) || !reads || repeats === MAX_REPEATS) throw error;
      repeats += 1;
      await new Promise((resolve) => waiting.push(resolve));
      continue;
    }
    if (answer?.ok) return answer;
    const refused = answer ? await refusal(answer) : new Refused(401, "The API key is not valid.");
    if (refused.status !== 401 || quiet || !(await ask(refused.message))) throw refused;
  }
}

async function sent(path, body, signal, more) {
  const headers = { ...more };
  if (key) headers.authorization = `Bearer ${key}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  const given = {
    method: body === undefined ? "GET" : "POST",
    headers,
    body: body === undefined ? undefined : JSON.stringify(body),
    signal,
    cache: "no-store",
    credentials: "omit",
    redirect: "error",
  };
  const answer = await fetch(path, given).catch((error) => {
    if (error.name === "AbortError") throw error;
    onContact(false);
    throw new Unreachable("The gateway does not answer.");
  });
  onContact(true);
  for (const resolve of waiting.splice(0)) resolve();
  return answer;
}

export async function json(path, given) {
  const answer = await asked(path, given);
  return answer.json().catch(broken("The connection was lost during the answer."));
}

// Returns a query string with the values that are set, or an empty string.
export function query(values) {
  const set = Object.entries(values).filter(([, value]) => value !== "" && value !== null && value !== undefined && value !== false);
  return set.length ? `?${new URLSearchParams(set.map(([name, value]) => [name, String(value)]))}` : "";
}

// Browsers describe a lost connection with little detail.
const broken = (words) => (error) => {
  throw error.name === "AbortError" ? error : new Error(words);
};

async function refusal(answer) {
  let error = {};
  try {
    error = (await answer.json()).error ?? {};
  } catch {
    // A proxy may answer with any content type.
  }
  const said = String(error.message ?? (answer.statusText || `HTTP ${answer.status}`));
  return new Refused(answer.status, said, error.code, error.param, answer.headers.get("retry-after"));
}

// Yields the JSON of each event of a stream up to `[DONE]`. `onTokens` is called with the segments of each comment with
// tokens, even after `[DONE]`.
export async function* events(answer, onTokens = () => {}) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let pieces = [];
  let isOver = false;
  try {
    for (;;) {
      const { done, value } = await reader.read().catch(broken("The connection was lost during the stream."));
      if (done) return;
      // A large event arrives in many chunks, which are joined once, at its end.
      pieces.push(value);
      if (!value.includes("\n")) continue;
      const lines = pieces.join("").split("\n");
      pieces = [lines.pop()];
      for (const line of lines) {
        if (line.startsWith(TOKENS)) onTokens(JSON.parse(line.slice(TOKENS.length)).segments);
        if (isOver || !line.startsWith("data:")) continue;
        const data = line.slice(5).trim();
        if (data === "[DONE]") isOver = true;
        else if (data) yield JSON.parse(data);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
