// Shows the playground's request as code. The key is an environment variable there, never the key itself; a `keyless`
// gateway needs none.

// The body is a here-document: it needs no quoting, and no argument can become too long. No line of JSON equals its
// terminator.
export function toCurl(path, body, keyless) {
  return [
    `curl ${location.origin}${path} \\`,
    ...(body.stream ? ["  --no-buffer \\"] : []),
    ...(keyless ? [] : ["  -H \"Authorization: Bearer $UNISONO_API_KEY\" \\"]),
    "  -H 'Content-Type: application/json' \\",
    "  -d @- <<'JSON'",
    JSON.stringify(body, null, 2),
    "JSON",
    "",
  ].join("\n");
}

export function toPython(path, body, keyless) {
  const create = path.endsWith("/responses") ? "responses.create" : "chat.completions.create";
  const fields = Object.entries(body).map(([name, value]) => `    ${name}=${literal(value, 4)},`);
  const name = body.stream ? "stream" : "answer";
  return [
    ...(keyless ? [] : ["import os", ""]),
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url=${JSON.stringify(`${location.origin}/v1`)}, api_key=${keyless ? '"none"' : 'os.environ["UNISONO_API_KEY"]'})`,
    `${name} = client.${create}(`,
    ...fields,
    ")",
    ...(body.stream ? ["for event in stream:", "    print(event)"] : ["print(answer)"]),
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
