"""Models that are not Harmony: requests go on as they came, to a backend's own API or to another provider.

A request that passes through is a turn like any other, with the body it came in (`core.passing.Passage`). So whatever
stands around turns counts, watches and ends it too: keys, limits and the ledger, metrics and spans, shutdown. It takes
places from the same pool as the engine does, on deployments that answer in OpenAI's own API, so that lines, weights,
circuits and second tries are the same. `turns` decides who answers a turn: the engine, one of these deployments, or one
after the other while nothing was shown. `relaying` reads of an answer what it has to know, and changes nothing of it
but the model's name. `providers` is the one place that knows the `litellm` package.
"""
