"""Models that generate no text through the OpenAI SDK."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import openai
import pytest
from openai import OpenAI

if TYPE_CHECKING:
    from conftest import Stage


def test_embeddings_have_the_order_of_the_inputs(scripted: OpenAI) -> None:
    answer = scripted.embeddings.create(model="embedder", input=["four", "a longer text"], encoding_format="float")
    assert answer.model == "embedder"
    assert [(one.index, one.embedding[0]) for one in answer.data] == [(0, 6.0), (1, 15.0)]
    assert answer.usage.total_tokens == 2


def test_vectors_are_the_same_as_base64_and_as_numbers(stage: Stage, connect: Callable[..., OpenAI]) -> None:
    # The SDK requests base64 by default, decodes it itself, and declares a list of numbers.
    client = connect(f"{stage.scripted}/v1", api_key=stage.key, _strict_response_validation=False)
    default = client.embeddings.create(model="embedder", input="four")
    numbers = client.embeddings.create(model="embedder", input="four", encoding_format="float")
    assert default.data[0].embedding == numbers.data[0].embedding


def test_moderations_need_no_model(stage: Stage, connect: Callable[..., OpenAI]) -> None:
    # The scripted answer has one category only.
    client = connect(f"{stage.scripted}/v1", api_key=stage.key, _strict_response_validation=False)
    answer = client.moderations.create(input=["a", "b"])
    assert [result.flagged for result in answer.results] == [True, True]
    assert answer.model == "moderator"


def test_images_are_returned_with_their_usage(scripted: OpenAI) -> None:
    answer = scripted.images.generate(model="painter", prompt="a cat", n=2, response_format="b64_json")
    assert answer.data is not None
    assert [image.b64_json for image in answer.data] == ["QUJD", "QUJD"]


def test_unfinished_images_are_streamed(scripted: OpenAI) -> None:
    with scripted.images.generate(model="painter", prompt="a cat", stream=True, partial_images=2) as stream:
        events = list(stream)
    assert [event.type for event in events] == [*["image_generation.partial_image"] * 2, "image_generation.completed"]
    assert all(event.b64_json.startswith("QUJD") for event in events)
    last = events[-1]
    assert last.type == "image_generation.completed"
    assert last.usage.total_tokens == 43


def test_speech_is_streamed_and_read_whole(scripted: OpenAI) -> None:
    request = {"model": "speaker", "voice": "alloy", "input": "Say this."}
    whole = scripted.audio.speech.create(**request).read()
    with scripted.audio.speech.with_streaming_response.create(**request) as response:
        streamed = b"".join(response.iter_bytes())
    assert whole == streamed
    assert whole.startswith(b"RIFF")


def test_audio_is_transcribed(stage: Stage, connect: Callable[..., OpenAI]) -> None:
    # The usage of the scripted answer is not that of the SDK's types.
    client = connect(f"{stage.scripted}/v1", api_key=stage.key, _strict_response_validation=False)
    audio = ("a.wav", b"RIFF" + bytes(10_000), "audio/wav")
    assert client.audio.transcriptions.create(model="listener", file=audio, language="de").text == "Said."
    with pytest.raises(openai.BadRequestError) as raised:
        client.audio.transcriptions.create(model="scripted", file=audio)
    assert raised.value.param == "model"
