"""The Azure client of the OpenAI SDK, with Azure's paths and its header for the key."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import openai
import pytest
from openai_sdk.asking import scripted_request

if TYPE_CHECKING:
    from conftest import Stage

VERSION = "2024-10-21"


@pytest.mark.parametrize("deployment", [None, "scripted"], ids=["by the model", "by the client"])
def test_a_deployment_answers(stage: Stage, deployment: str | None) -> None:
    place: dict[str, Any] = {"azure_endpoint": stage.scripted, "azure_deployment": deployment}
    with openai.AzureOpenAI(api_key=stage.key, api_version=VERSION, **place) as client:
        answer = client.chat.completions.create(**scripted_request("an answer"))
        stream = client.chat.completions.create(**scripted_request("an answer"), stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert answer.choices[0].message.content == text != ""


@pytest.mark.parametrize("version", [VERSION, "preview"])
def test_the_responses_api_has_azures_path(stage: Stage, version: str) -> None:
    request: dict[str, Any] = {"model": "scripted", "input": "script: an answer", "store": False}
    with openai.AzureOpenAI(azure_endpoint=stage.scripted, api_key=stage.key, api_version=version) as client:
        answer = client.responses.create(**request)
        stream = client.responses.create(**request, stream=True)
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert answer.output_text == text == "Here is the answer."


def test_embeddings_and_models_have_azures_paths(stage: Stage) -> None:
    with openai.AzureOpenAI(azure_endpoint=stage.scripted, api_key=stage.key, api_version=VERSION) as client:
        assert client.embeddings.create(model="embedder", input="four").data[0].embedding[0] == 6.0
        assert "embedder" in {model.id for model in client.models.list()}


def test_a_wrong_key_is_refused(stage: Stage) -> None:
    with (
        openai.AzureOpenAI(azure_endpoint=stage.scripted, api_key="sk-wrong", api_version=VERSION) as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.embeddings.create(model="embedder", input="four")
