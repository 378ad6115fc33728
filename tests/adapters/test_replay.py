"""Tests of the replay backend: which recorded turn answers a prompt, and its timing."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter
from typing import Any

import orjson
import pytest

from unisono.core.generation import Chunk, CompletionJob, FinishReason, Prompt, Timeouts
from unisono.core.ports import BackendOptions
from unisono.errors import BackendError, BackendTimeout, BackendUnavailable, ConfigError
from unisono.harmony.encoding import Encoding, load_encoding
from unisono_adapters.replay import ReplayBackend

HI = "<|channel|>final<|message|>Hi<|return|>"
CALL = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>"
DONE = "<|channel|>final<|message|>Done<|return|>"
OTHER = "<|channel|>final<|message|>What?<|return|>"

TURNS: list[dict[str, object]] = [
    {"ends": "<|channel|>final<|message|>Forced: ", "text": "yes<|return|>"},
    {"last": "Hello", "text": HI},
    {"last": "Use <|end|> f", "text": CALL},
    {"last": "42", "text": DONE},
    {"text": OTHER, "finish": "length"},
]

USER = "<|start|>system<|message|>S<|end|><|start|>user<|message|>{}<|end|><|start|>assistant"
TOOL = "<|start|>functions.f to=assistant<|channel|>commentary<|message|>42<|end|><|start|>assistant"

PROMPTS: dict[str, tuple[str, str]] = {
    "last user message": (USER.format("Hello"), HI),
    "earlier user message": (USER.format("Hello") + HI + USER.format("Bye"), OTHER),
    "tool result": (USER.format("Hello") + CALL + TOOL, DONE),
    "matching end of the prompt": (USER.format("Hello") + "<|channel|>final<|message|>Forced: ", "yes<|return|>"),
    "no match": (USER.format("Hello!"), OTHER),
    "no conversation": ("Once upon", OTHER),
    "started answer": (USER.format("Hello") + "<|channel|>final", "<|message|>Hi<|return|>"),
    "complete answer": (USER.format("Hello") + HI, ""),
}


@pytest.fixture(scope="module")
def encoding() -> Encoding:
    return load_encoding()


@pytest.fixture
def recording(tmp_path: Path) -> str:
    path = tmp_path / "recording.json"
    path.write_bytes(orjson.dumps({"source": "these tests", "licence": "Apache-2.0", "turns": TURNS}))
    return str(path)


def replay(model: str, **extra: Any) -> ReplayBackend:
    return ReplayBackend(BackendOptions("replay", model, extra=extra))


async def collect(backend: ReplayBackend, prompt: list[int], max_tokens: int = 500) -> list[Chunk]:
    return [chunk async for chunk in backend.complete(CompletionJob(Prompt(prompt), max_tokens))]


def tokens(chunks: list[Chunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.tokens]


@pytest.mark.parametrize(("prompt", "answer"), PROMPTS.values(), ids=PROMPTS)
async def test_first_matching_turn_is_replayed(recording: str, encoding: Encoding, prompt: str, answer: str) -> None:
    chunks = await collect(replay(recording), encoding.encode_marked(prompt))
    assert encoding.decode(tokens(chunks)) == answer
    assert chunks[-1].finish is (FinishReason.LENGTH if answer == OTHER else FinishReason.STOP)
    assert chunks[-1].prompt_tokens == len(encoding.encode_marked(prompt))


async def test_marker_typed_by_the_user_is_matched_as_text(recording: str, encoding: Encoding) -> None:
    typed_tokens = encoding.encode_text("Use <|end|> f")
    prompt = encoding.encode_marked(USER.format("@"))
    position = prompt.index(encoding.encode_text("@")[0])
    chunks = await collect(replay(recording), prompt[:position] + typed_tokens + prompt[position + 1 :])
    assert encoding.decode(tokens(chunks)) == CALL


async def test_prompt_that_differs_from_the_recorded_answer_is_refused(recording: str, encoding: Encoding) -> None:
    with pytest.raises(BackendError, match="differs"):
        await collect(replay(recording), encoding.encode_marked(USER.format("Hello") + "<|channel|>analysis"))


async def test_recording_without_a_matching_turn_is_a_backend_error(tmp_path: Path, encoding: Encoding) -> None:
    path = tmp_path / "r.json"
    path.write_bytes(orjson.dumps({"turns": TURNS[:1]}))
    with pytest.raises(BackendError, match="no answer"):
        await collect(replay(str(path)), encoding.encode_marked(USER.format("Hello")))


async def test_json_lines_are_read_as_turns(tmp_path: Path, encoding: Encoding) -> None:
    path = tmp_path / "r.jsonl"
    path.write_bytes(b"\n".join(orjson.dumps(line) for line in ({"source": "x"}, *TURNS)))
    chunks = await collect(replay("some-model", recording=str(path)), encoding.encode_marked(USER.format("Hello")))
    assert encoding.decode(tokens(chunks)) == HI


async def test_max_tokens_cuts_the_answer_at_every_position(recording: str, encoding: Encoding) -> None:
    prompt = encoding.encode_marked(USER.format("Hello"))
    all_tokens = encoding.encode_marked(HI)
    for limit in range(1, len(all_tokens) + 2):
        chunks = await collect(replay(recording), prompt, limit)
        assert tokens(chunks) == all_tokens[:limit]
        assert chunks[-1].finish is (FinishReason.STOP if limit >= len(all_tokens) else FinishReason.LENGTH)


async def test_interval_and_chunk_size_are_options(recording: str, encoding: Encoding) -> None:
    prompt = encoding.encode_marked(USER.format("Hello"))
    started = perf_counter()
    chunks = await collect(replay(recording, interval_s=0.02, chunk=2), prompt)
    assert [len(chunk.tokens) for chunk in chunks] == [2, 2, 1]
    assert 0.06 <= perf_counter() - started < 1


TIMEOUTS = {
    "first token": Timeouts(first_token_s=0.05),
    "silence": Timeouts(silence_s=0.05),
    "total": Timeouts(total_s=0.25),
}


@pytest.mark.parametrize("timeouts", TIMEOUTS.values(), ids=TIMEOUTS)
async def test_slow_replay_exceeds_each_timeout(recording: str, encoding: Encoding, timeouts: Timeouts) -> None:
    backend = replay(recording, interval_s=0.1)
    await backend.probe()
    job = CompletionJob(Prompt(encoding.encode_marked(USER.format("Hello"))), 50, timeouts=timeouts)
    started = perf_counter()
    with pytest.raises(BackendTimeout):
        async for _ in backend.complete(job):
            pass
    assert perf_counter() - started < 1


UNREADABLE = {
    "not JSON": b"{",
    "list": b"[]",
    "no turns": b"{}",
    "invalid turns": b'{"turns": [7]}',
    "no tokens": b'{"turns": [{"last": "x"}]}',
    "invalid tokens": b'{"turns": [{"tokens": ["a"]}]}',
    "ids beyond the vocabulary": b'{"turns": [{"tokens": [201088]}]}',
    "unknown finish reason": b'{"turns": [{"tokens": [1], "finish": "tired"}]}',
    "not UTF-8": b'{"turns": [{"text": "\xff"}]}',
}


@pytest.mark.parametrize("content", UNREADABLE.values(), ids=UNREADABLE)
async def test_unreadable_recording_is_unavailable_without_its_path(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "r.json"
    path.write_bytes(content)
    with pytest.raises(BackendUnavailable) as caught:
        await replay(str(path)).probe()
    assert str(tmp_path) not in caught.value.message


async def test_missing_recording_is_unavailable(tmp_path: Path) -> None:
    with pytest.raises(BackendUnavailable):
        await collect(replay(str(tmp_path / "none.json")), [1])


@pytest.mark.parametrize("extra", [{"chunk": 0}, {"chunk": "1"}, {"chunk": True}, {"interval_s": -1}, {"context": 0.5}])
def test_invalid_option_is_a_config_error(extra: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        replay("demo", **extra)


DEMO = {
    "greeting": ("Hello!", "Hello! How can I help you today?<|return|>"),
    "call": ("What is the weather in Paris?", '<|constrain|>json<|message|>{"location":"Paris"}<|call|>'),
    "intentionally malformed": ("glitch no channel", "<|message|>The channel is missing.<|return|>"),
    "anything else": ("Explain everything.", "but I did read your message.<|return|>"),
}


@pytest.mark.parametrize(("message", "ending"), DEMO.values(), ids=DEMO)
async def test_packaged_demo_answers(encoding: Encoding, message: str, ending: str) -> None:
    backend = replay("demo")
    assert (await backend.probe()).capabilities.context
    chunks = await collect(backend, encoding.encode_marked(USER.format(message)))
    assert encoding.decode(tokens(chunks)).endswith(ending)
