// Presets and examples of the playground. All of them work on the demo model.

import example from "/page/views/exampletool.js";

export const PRESETS = {
  plain: { title: "Plain", values: { system: "", effort: "", temperature: "" } },
  exact: { title: "Exact", values: { system: "Answer briefly and exactly. Say so if you do not know.", effort: "low", temperature: "0" } },
  coder: { title: "Programmer", values: { system: "You are a careful programmer. Answer with complete code in one block, then explain it in a few sentences.", effort: "high", temperature: "" } },
  translator: { title: "Translator", values: { system: "Translate the text of the user to English. Answer with the translation only.", effort: "low", temperature: "0" } },
};

export const TOOL_EXAMPLES = {
  weather: { title: "Weather", tools: [example.tool] },
  search: { title: "Search", tools: [{ type: "function", function: { name: "search", description: "Searches the documents.", parameters: { type: "object", properties: { query: { type: "string" }, limit: { type: "integer", minimum: 1 } }, required: ["query"] } } }] },
};

export const SCHEMA_EXAMPLES = {
  answer: { title: "Answer", schema: { type: "object", properties: { answer: { type: "string" } }, required: ["answer"], additionalProperties: false } },
  person: { title: "Person", schema: { type: "object", properties: { name: { type: "string" }, age: { type: "integer" }, languages: { type: "array", items: { type: "string" } } }, required: ["name", "age", "languages"], additionalProperties: false } },
};

// Example for new users: a tool call without typing.
export const FIRST = { message: example.message, values: { tools: JSON.stringify([example.tool], null, 2), temperature: "0", surface: "chat", choice: "auto", format: "text" } };
