// Converts a request to a program that runs without changes. The program reads the key from an environment variable and
// never contains the key. For a `keyless` gateway, it needs no key.

// The body is a here-document: it needs no quoting, and no argument can become too long. No line of JSON equals its
// terminator.
export function toCurl({ path, body, headers }, keyless) {
  return [
    `curl ${location.origin}${path} \\`,
    ...(body.stream ? ["  --no-buffer \\"] : []),
    ...(keyless ? [] : ["  -H \"Authorization: Bearer $UNISONO_API_KEY\" \\"]),
    "  -H 'Content-Type: application/json' \\",
    ...Object.entries(headers).map(([name, value]) => `  -H ${quoted(`${name}: ${value}`)} \\`),
    "  -d @- <<'JSON'",
    JSON.stringify(body, null, 2),
    "JSON",
    "",
  ].join("\n");
}

// A single-quoted word of a shell.
const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

const CREATE = { "/v1/responses": "responses.create", "/v1/chat/completions": "chat.completions.create", "/v1/completions": "completions.create", "/v1/messages": "messages.create" };

export function toPython({ path, body, headers, extra }, keyless) {
  const isMessages = path === "/v1/messages";
  const known = Object.entries(body).filter(([name]) => !extra.includes(name));
  const more = Object.fromEntries(Object.entries(body).filter(([name]) => extra.includes(name)));
  const options = Object.entries({ extra_body: more, extra_headers: headers }).filter(([, values]) => Object.keys(values).length);
  const fields = [...known, ...options].map(([name, value]) => `    ${name}=${literal(value, 4)},`);
  const name = body.stream ? "stream" : "answer";
  const [library, client, base] = isMessages ? ["anthropic", "Anthropic", location.origin] : ["openai", "OpenAI", `${location.origin}/v1`];
  return [
    `# pip install ${library}`,
    ...(keyless ? [] : ["import os", ""]),
    `from ${library} import ${client}`,
    "",
    `client = ${client}(base_url=${JSON.stringify(base)}, api_key=${keyless ? '"none"' : 'os.environ["UNISONO_API_KEY"]'})`,
    `${name} = client.${CREATE[path]}(`,
    ...fields,
    ")",
    ...(body.stream ? ["for event in stream:", "    print(event)"] : ["print(answer)"]),
    "",
  ].join("\n");
}

// A module for Node.js 18 and newer, without packages.
export function toJavaScript({ path, body, headers }, keyless) {
  const json = JSON.stringify(body, null, 2).replaceAll("\u2028", "\\u2028").replaceAll("\u2029", "\\u2029");
  return [
    `const answer = await fetch(${JSON.stringify(location.origin + path)}, {`,
    "  method: \"POST\",",
    "  headers: {",
    "    \"content-type\": \"application/json\",",
    ...Object.entries(headers).map(([name, value]) => `    ${JSON.stringify(name)}: ${JSON.stringify(value)},`),
    ...(keyless ? [] : ["    authorization: `Bearer ${process.env.UNISONO_API_KEY}`,"]),
    "  },",
    `  body: JSON.stringify(${json.replaceAll("\n", "\n  ")}),`,
    "});",
    ...(body.stream
      ? ["for await (const part of answer.body.pipeThrough(new TextDecoderStream())) process.stdout.write(part);"]
      : ["console.log(JSON.stringify(await answer.json(), null, 2));"]),
    "",
  ].join("\n");
}

function literal(value, indent) {
  if (value === null) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const inner = " ".repeat(indent + 4);
  const outer = " ".repeat(indent);
  if (Array.isArray(value)) {
    if (!value.length) return "[]";
    return `[\n${value.map((one) => `${inner}${literal(one, indent + 4)},\n`).join("")}${outer}]`;
  }
  const entries = Object.entries(value);
  if (!entries.length) return "{}";
  return `{\n${entries.map(([name, one]) => `${inner}${JSON.stringify(name)}: ${literal(one, indent + 4)},\n`).join("")}${outer}}`;
}
