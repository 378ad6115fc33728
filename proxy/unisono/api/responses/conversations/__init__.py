"""OpenAI's Conversations API: items that are kept for as long as anybody talks, and responses that grow them."""
