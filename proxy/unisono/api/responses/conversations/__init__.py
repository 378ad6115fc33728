"""OpenAI's Conversations API: stored items, and responses that append to them."""
