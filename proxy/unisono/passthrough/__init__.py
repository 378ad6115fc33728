"""Pass-through of requests to backends with their own API, or to other providers.

A pass-through request is a `GenerationRequest` that also contains the original body
(`core.passthrough_request.PassthroughRequest`). All wrappers of generation streams therefore apply to it: keys, limits,
the usage ledger, metrics, spans and shutdown. It uses slots of the engine's deployment pool, on deployments that answer
in OpenAI's own API. Queues, weights, circuit breakers and retries are therefore the same as for the engine.

`dispatch` selects the engine or a pass-through deployment. If both can answer a request, one of them is tried first,
and the other one only if the first fails before any output. `text_relays` reads facts such as the usage from an
answer, and changes only the model's name. `litellm_backend` is the only module that imports the `litellm` package.
"""
