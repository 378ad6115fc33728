"""APIs of models that generate no text, such as embeddings; their requests pass through."""
