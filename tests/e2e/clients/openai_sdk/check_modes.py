"""Models that generate no text through the OpenAI SDK."""

from __future__ import annotations

from openai import OpenAI


def test_embeddings_have_the_order_of_the_inputs(scripted: OpenAI) -> None:
    answer = scripted.embeddings.create(model="embedder", input=["four", "a longer text"])
    assert answer.model == "embedder"
    assert [(one.index, one.embedding[0]) for one in answer.data] == [(0, 6.0), (1, 15.0)]
    assert answer.usage.total_tokens == 2


def test_vectors_are_the_same_as_base64_and_as_numbers(scripted: OpenAI) -> None:
    # The SDK requests base64 by default and decodes it itself.
    default = scripted.embeddings.create(model="embedder", input="four")
    numbers = scripted.embeddings.create(model="embedder", input="four", encoding_format="float")
    assert default.data[0].embedding == numbers.data[0].embedding
