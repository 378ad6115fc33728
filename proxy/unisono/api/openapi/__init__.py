"""The gateway's own description: an OpenAPI document, made of the models that judge requests, when somebody asks."""
