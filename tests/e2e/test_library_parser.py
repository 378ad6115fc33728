"""The setting `library_parser`: openai-harmony reads the messages, and the answers stay the same."""

from __future__ import annotations

import pytest

from tests.e2e.gateway import config_of, gateway, message_of
from tests.fakes import FakeVllm, VllmScript
from unisono.harmony.encoding import load_encoding
from unisono.harmony.library_parser import LibraryBodyText

ANSWER = "Zwölf 🦜🦜 und 鸚鵡."
TOKENS = load_encoding().encode_marked(
    f"<|channel|>analysis<|message|>Hm 🦜.<|end|><|start|>assistant<|channel|>final<|message|>{ANSWER}<|return|>"
)


@pytest.mark.parametrize("library", [False, True])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.asyncio
async def test_the_setting_selects_the_reader_of_messages(
    monkeypatch: pytest.MonkeyPatch, library: bool, stream: bool
) -> None:
    read: list[int] = []
    text_of = LibraryBodyText.text_of

    def recorded(reader: LibraryBodyText, token: int) -> str | None:
        read.append(token)
        return text_of(reader, token)

    monkeypatch.setattr(LibraryBodyText, "text_of", recorded)
    async with FakeVllm() as fake:
        fake.script = lambda _: VllmScript(tokens=TOKENS, per_chunk=1)
        config = config_of(f"vllm@{fake.url}", unisono={"library_parser": library})
        async with gateway(config) as running:
            answer = await running.chat(stream=stream)
    message = message_of(answer)
    assert (message.content, message.reasoning) == (ANSWER, "Hm 🦜.")
    assert bool(read) is library
