"""OpenAI's Responses API: what a request asks, and its answer as items, events and an object that is kept."""
