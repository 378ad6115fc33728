"""Functions of litellm by API, and the body fields that are their arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from unisono.core.passthrough_request import Api

_COMMON: Final = (
    "temperature top_p tools tool_choice parallel_tool_calls metadata user service_tier store stream_options "
    "safety_identifier prompt_cache_key top_logprobs"
)
# Body fields of a client that become arguments of litellm. All other fields are added to the body that litellm sends.
FIELDS: Final[Mapping[Api, frozenset[str]]] = {
    Api.CHAT: frozenset(
        (
            "messages n max_tokens max_completion_tokens stop presence_penalty frequency_penalty logit_bias logprobs "
            "response_format seed functions function_call modalities prediction audio reasoning_effort verbosity "
            f"web_search_options thinking top_k {_COMMON}"
        ).split()
    ),
    Api.RESPONSES: frozenset(
        (
            "input instructions max_output_tokens max_tool_calls text reasoning truncation include "
            f"previous_response_id conversation background prompt {_COMMON}"
        ).split()
    ),
    Api.EMBEDDINGS: frozenset({"input", "dimensions", "encoding_format", "user"}),
    Api.RERANK: frozenset(["query", "documents", "top_n", "rank_fields", "return_documents", "max_chunks_per_doc"]),
    Api.MODERATIONS: frozenset({"input"}),
    Api.IMAGES: frozenset(
        [
            "prompt",
            "n",
            "quality",
            "response_format",
            "size",
            "style",
            "background",
            "output_format",
            "output_compression",
            "moderation",
            "user",
        ]
    ),
    Api.SPEECH: frozenset({"input", "voice", "response_format", "speed", "instructions"}),
    Api.TRANSCRIPTIONS: frozenset(
        ["file", "language", "prompt", "response_format", "timestamp_granularities", "temperature", "user"]
    ),
}
# Functions of litellm.
FUNCTIONS: Final[Mapping[Api, str]] = {
    Api.CHAT: "acompletion",
    Api.RESPONSES: "aresponses",
    Api.EMBEDDINGS: "aembedding",
    Api.RERANK: "arerank",
    Api.MODERATIONS: "amoderation",
    Api.IMAGES: "aimage_generation",
    Api.SPEECH: "aspeech",
    Api.TRANSCRIPTIONS: "atranscription",
}
