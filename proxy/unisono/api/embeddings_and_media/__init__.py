"""APIs of models that generate no text, such as embedding models. Requests pass through."""
