"""OpenAI's Responses API: requests, and answers as items, events and stored objects."""
