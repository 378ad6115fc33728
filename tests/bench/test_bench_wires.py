"""Readers accept an answer split anywhere and report missing or different parts."""

from collections.abc import Callable
from dataclasses import asdict

import orjson
import pytest

from bench import readers, vllm_wire, wires
from bench.load import Load, parse, quantile
from bench.prior_turns import PriorTurnsJob
from bench.prose import Answer, Corpus


def unframed(chunks: bytes) -> bytes:
    """Decode a body in chunked transfer coding, including its last chunk."""
    body = b""
    while chunks:
        size, _, rest = chunks.partition(b"\r\n")
        body += rest[: int(size, 16)]
        assert rest[int(size, 16) :][:2] == b"\r\n"
        chunks = rest[int(size, 16) + 2 :]
    return body


def vllm_stream(answer: Answer, tokens_per_chunk: int = 1) -> bytes:
    rendered = vllm_wire.render(answer, tokens_per_chunk)
    request_id = "0123456789abcdef" * 2
    rest = b"".join(template.fill(request_id.encode()) for template in rendered.rest)
    return unframed(rendered.first(request_id, [1, 2, 3]) + rest + rendered.tail(request_id, 3, counted=True))


def chat_stream(answer: Answer, error: bool = False) -> bytes:
    def chunk(delta: dict[str, str], finish: str | None = None) -> dict[str, object]:
        return {"id": "c", "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}

    half = len(answer.content) // 2
    events: list[object] = [
        chunk({"role": "assistant", "content": ""}),
        chunk({"reasoning": answer.reasoning, "reasoning_content": answer.reasoning}),
        chunk({"content": answer.content[:half]}),
        chunk({"content": answer.content[half:]}),
        chunk({}, answer.finish),
        {"id": "c", "choices": [], "usage": {"completion_tokens": len(answer.tokens)}},
    ]
    if error:
        events.insert(3, {"error": {"message": "gone"}})
    lines = [b"data: " + orjson.dumps(event) + b"\n\n" for event in events]
    return b": keep-alive\n\n" + b"".join(lines) + b"data: [DONE]\n\n"


def response(answer: Answer) -> dict[str, object]:
    """Return the completed response object."""
    return {
        "id": "resp_1",
        "status": "completed",
        "output": [
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": answer.reasoning}]},
            {"type": "message", "content": [{"type": "output_text", "text": answer.content}]},
        ],
        "usage": {"output_tokens": len(answer.tokens)},
    }


def responses_stream(answer: Answer) -> bytes:
    def event(name: str, body: dict[str, object]) -> bytes:
        return b"event: " + name.encode() + b"\ndata: " + orjson.dumps({"type": name, **body}) + b"\n\n"

    half = len(answer.content) // 2
    return b"".join(
        [
            event("response.created", {"response": {"id": "resp_1", "status": "in_progress"}}),
            event("response.reasoning_text.delta", {"delta": answer.reasoning}),
            event("response.output_text.delta", {"delta": answer.content[:half]}),
            event("response.output_text.delta", {"delta": answer.content[half:]}),
            event("response.completed", {"response": response(answer)}),
            b"data: [DONE]\n\n",
        ]
    )


def messages_stream(answer: Answer) -> bytes:
    def event(name: str, **body: object) -> bytes:
        return b"event: " + name.encode() + b"\ndata: " + orjson.dumps({"type": name, **body}) + b"\n\n"

    half = len(answer.content) // 2
    thinking = {"type": "thinking_delta", "thinking": answer.reasoning}
    return b"".join(
        [
            event("message_start", message={"id": "msg_1"}),
            event("ping"),
            event("content_block_delta", index=0, delta=thinking),
            event("content_block_delta", index=0, delta={"type": "signature_delta", "signature": "x"}),
            event("content_block_delta", index=1, delta={"type": "text_delta", "text": answer.content[:half]}),
            event("content_block_delta", index=1, delta={"type": "text_delta", "text": answer.content[half:]}),
            event("message_delta", delta={"stop_reason": "end_turn"}, usage={"output_tokens": len(answer.tokens)}),
            event("message_stop"),
        ]
    )


STREAMS: dict[str, Callable[[Answer], bytes]] = {
    "vllm": vllm_stream,
    "chat": chat_stream,
    "responses": responses_stream,
    "messages": messages_stream,
}


@pytest.mark.parametrize("tokens_per_chunk", [1, 3, 40, 100])
def test_chunks_have_the_fields_of_vllm_and_each_token_once(corpus: Corpus, tokens_per_chunk: int) -> None:
    answer = corpus.answer(40)
    *events, done, nothing = vllm_stream(answer, tokens_per_chunk).split(b"\n\n")
    chunks = [orjson.loads(event.removeprefix(b"data: ")) for event in events]
    assert (done, nothing) == (b"data: [DONE]", b"")
    assert chunks.pop()["usage"]["completion_tokens"] == 40
    choices = [chunk["choices"][0] for chunk in chunks]
    assert {tuple(choice) for choice in choices} == {
        ("index", "text", "logprobs", "finish_reason", "stop_reason", "prompt_token_ids", "token_ids")
    }
    assert tuple(token for choice in choices for token in choice["token_ids"]) == answer.tokens
    assert [choice["prompt_token_ids"] for choice in choices] == [[1, 2, 3], *[None] * (len(choices) - 1)]
    assert [choice["finish_reason"] for choice in choices] == [*[None] * (len(choices) - 1), "stop"]


@pytest.mark.parametrize("wire", STREAMS)
@pytest.mark.parametrize("step", [1, 7, 100, 100_000])
def test_a_reader_accepts_an_answer_split_anywhere(corpus: Corpus, wire: str, step: int) -> None:
    answer = corpus.answer(60)
    stream = STREAMS[wire](answer)
    reader = wires.reader(wire, stream=True)
    for start in range(0, len(stream), step):
        reader.feed(stream[start : start + step])
    assert reader.fault(200, answer) is None
    assert reader.clock.first is not None


FAULTS: dict[str, tuple[str, Callable[[Answer], bytes], str]] = {
    "different answer on the vLLM wire": ("vllm", lambda _: vllm_stream(_other_answer(60)), "token ids differ"),
    "missing [DONE]": ("vllm", lambda answer: vllm_stream(answer).removesuffix(b"data: [DONE]\n\n"), "no [DONE]"),
    "different reasoning": ("chat", lambda a: chat_stream(a).replace(b"harbour", b"Harbour", 2), "reasoning differs"),
    "error in the middle": ("chat", lambda answer: chat_stream(answer, error=True), "error in the stream"),
    "wrong token count": (
        "chat",
        lambda a: chat_stream(a).replace(b'tokens":60', b'tokens":61'),
        "usage says 61 tokens",
    ),
    "different text in a response": (
        "responses",
        lambda a: responses_stream(a).replace(b'delta":"', b'delta":"x', 1),
        "reasoning differs",
    ),
    "missing last event": (
        "responses",
        lambda a: responses_stream(a).rpartition(b"event: ")[0],
        "no last event",
    ),
    "error in a response": (
        "responses",
        lambda a: b'event: error\ndata: {"message":"gone"}\n\n' + responses_stream(a),
        "error in the stream",
    ),
    "incomplete response": (
        "responses",
        lambda a: responses_stream(a).replace(b'"completed"', b'"incomplete"'),
        "the response is incomplete",
    ),
    "different text in a message": (
        "messages",
        lambda a: messages_stream(a).replace(b'"text":"', b'"text":"x', 1),
        "text differs",
    ),
    "missing message_stop": (
        "messages",
        lambda a: messages_stream(a).rpartition(b"event: ")[0],
        "no message_stop",
    ),
    "error in a message": (
        "messages",
        lambda a: messages_stream(a) + b'event: error\ndata: {"type":"error"}\n\n',
        "error in the stream",
    ),
    "wrong token count in a message": (
        "messages",
        lambda a: messages_stream(a).replace(b'tokens":60', b'tokens":61'),
        "usage says 61 tokens",
    ),
    "wrong finish reason": ("chat", lambda a: chat_stream(a).replace(b'"stop"', b'"length"'), "finish_reason length"),
}


def _other_answer(length: int) -> Answer:
    tokens = tuple(range(length))
    return Answer(tokens, tuple("x" for _ in tokens), "", "", "stop")


@pytest.mark.parametrize(("wire", "make", "expected"), FAULTS.values(), ids=FAULTS)
def test_a_reader_reports_the_fault_of_a_stream(
    corpus: Corpus, wire: str, make: Callable[[Answer], bytes], expected: str
) -> None:
    answer = corpus.answer(60)
    reader = wires.reader(wire, stream=True)
    reader.feed(make(answer))
    assert expected in str(reader.fault(200, answer))


RESPONSE_FAULTS: dict[str, tuple[dict[str, object], str]] = {
    "nothing": ({}, "the response is None"),
    "failed": ({"status": "failed"}, "the response is failed"),
    "no output": ({"output": []}, "the whole reasoning differs"),
    "no usage": ({"usage": None}, "usage says None tokens"),
}


@pytest.mark.parametrize(("changed", "expected"), RESPONSE_FAULTS.values(), ids=RESPONSE_FAULTS)
def test_the_fault_of_a_whole_response_is_reported(corpus: Corpus, changed: dict[str, object], expected: str) -> None:
    answer = corpus.answer(60)
    whole = wires.reader("responses", stream=False)
    whole.feed(orjson.dumps(response(answer)))
    assert whole.fault(200, answer) is None
    assert readers.response_fault(response(answer) | changed if changed else {}, answer) == expected


def test_a_request_continues_a_previous_response(corpus: Corpus) -> None:
    question = wires.Question(1, extra_fields={"previous_response_id": "resp_1"})
    sent = wires.request("responses, not stored", corpus, question, tokens=12, stream=True)
    body = orjson.loads(sent.partition(b"\r\n\r\n")[2])
    assert (body["previous_response_id"], body["store"], body["max_output_tokens"]) == ("resp_1", False, 12)
    assert "stream_options" not in body


def test_the_history_seed_selects_the_conversation(corpus: Corpus) -> None:
    def messages(seed: int, history_seed: int) -> list[str]:
        question = wires.Question(seed, history=1000, history_seed=history_seed)
        body = wires.request("chat", corpus, question, tokens=12, stream=True).partition(b"\r\n\r\n")[2]
        return [message["content"] for message in orjson.loads(body)["messages"]]

    first, further, other = messages(1, 0), messages(2, 0), messages(1, 9)
    assert len(first) == 6
    assert first[:-1] == further[:-1]
    assert first[-1] != further[-1]
    assert not set(first[1:-1]) & set(other[1:-1])


def test_gaps_are_measured_only_between_texts_of_one_kind() -> None:
    clock = readers.Clock()
    for kind in ("reasoning", "reasoning", "content", "content", "content"):
        clock.mark(kind)
    assert len(clock.gaps) == 3


def test_a_load_is_parsed_from_its_json_line() -> None:
    load = Load(wire="chat", port=1, streams=2, tokens=3)
    fields = {"wire": "chat", "port": 1, "streams": 2, "tokens": 3}
    assert parse(orjson.dumps(fields | {"cold": None})) == load
    job = PriorTurnsJob("chain", port=1, count=2, turns=3, tokens=12, seed=4, key="k")
    assert parse(orjson.dumps(asdict(job))) == job
    late = parse(orjson.dumps(fields | {"cold": {"words": 9, "every_s": 1, "count": 2}}))
    assert isinstance(late, Load)
    assert late.cold is not None
    assert (late.cold.words, late.cold.tokens) == (9, 16)


QUANTILES: dict[str, tuple[list[float], float, float]] = {
    "none": ([], 0.5, 0.0),
    "one": ([3.0], 0.99, 3.0),
    "middle": ([3.0, 1.0, 2.0], 0.5, 2.0),
    "last": ([1.0, 2.0], 1.0, 2.0),
}


@pytest.mark.parametrize(("values", "share", "expected"), QUANTILES.values(), ids=QUANTILES)
def test_quantiles(values: list[float], share: float, expected: float) -> None:
    assert quantile(values, share) == expected
