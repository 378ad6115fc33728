// Example of the playground. The demo model was trained on exactly this tool, and the tests read this file too.

export default {
  "message": "What is the weather in Paris?",
  "tool": {
    "type": "function",
    "function": {
      "name": "get_weather",
      "description": "Gets the current weather in a city.",
      "parameters": {
        "type": "object",
        "properties": {"location": {"type": "string", "description": "City name"}},
        "required": ["location"]
      }
    }
  }
};
