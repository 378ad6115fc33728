"""Prompts that every engine must continue with the same recorded token ids.

`python -m tests.engines_all.conversations` records the file again with mlx-lm in process. The tests compare every
engine with it, including mlx-lm. The tests of mlx-lm check the text of the answers.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from tests.engines.demo_prompts import CHATS, ENCODING, GLITCHES, WEATHER_CALL, WEATHER_RESULT, greedy, prompt_for
from unisono.core.ports import BackendOptions
from unisono_adapters.mlx.mlx_backend import MlxLocalBackend

RECORDED = Path(__file__).parent / "recorded_ids.json"
# Token limit of each answer. Only the answer to `song` is longer.
MAX_TOKENS = 120
SCHEMA = (
    '# Response Formats\n\n## answer\n\n{"type": "object", "properties": {"city": {"type": "string"}, '
    '"country": {"type": "string"}}}'
)
# Each repetition of this text has the same tokens.
FILLER = " Please read all of this with care before you answer."


def _after(prompt: list[int], *messages: str) -> list[int]:
    """Return the prompt with further messages, whose markers are spelled out."""
    return [*prompt, *(token for turn in messages for token in ENCODING.encode_marked(turn))]


def _effort(user: str, level: str) -> list[int]:
    text = ENCODING.decode(prompt_for(user))
    assert "Reasoning: medium" in text
    return ENCODING.encode_marked(text.replace("Reasoning: medium", f"Reasoning: {level}"))


@cache
def conversations() -> Mapping[str, list[int]]:
    """Return prompts by name. Each ends in `<|start|>assistant`."""
    weather = prompt_for("What is the weather in Paris?", tools=True)
    compare = prompt_for("Compare the weather in London and Tokyo.", tools=True)
    first = (
        "<|channel|>analysis<|message|>First London, then Tokyo.<|end|><|start|>assistant"
        '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"location":"London"}<|call|>'
    )
    answered = "<|channel|>final<|message|>pong<|end|><|start|>user<|message|>Hello!<|end|><|start|>assistant"
    return {
        **{name: prompt_for(user) for name, (user, _) in CHATS.items()},
        **{user: prompt_for(user, tools=_wants_tools(user)) for user in GLITCHES},
        "weather": weather,
        "weather answer": _after(weather, WEATHER_CALL, WEATHER_RESULT),
        "weather without tools": prompt_for("What is the weather in Paris?"),
        "plan": prompt_for("Make a plan first, then check the weather in Oslo.", tools=True),
        "compare": compare,
        "compare, second call": _after(compare, first, WEATHER_RESULT),
        "tool error": _after(weather, WEATHER_CALL, WEATHER_RESULT.replace("18 degrees, sunny", "Error: timeout")),
        "json": prompt_for("Which country is Paris in?", instructions=SCHEMA),
        "low effort": _effort("Hello!", "low"),
        "high effort": _effort("Hello!", "high"),
        "second turn": _after(prompt_for("ping"), answered),
        "unknown words": prompt_for("Quixotic zephyrs juggle vexed ibises."),
        "other scripts": prompt_for("これは何ですか？ 👩‍👩‍👧 Ünïcödé"),
        "song": prompt_for("Repeat la forever."),
        "long instructions": prompt_for("Hello!", instructions=FILLER * 60),
    }


def _wants_tools(user: str) -> bool:
    return any(word in user for word in ("call", "recipient", "json"))


@cache
def recorded() -> Mapping[str, list[int]]:
    return {name: list(ids) for name, ids in json.loads(RECORDED.read_text()).items()}


async def record() -> None:
    backend = MlxLocalBackend(BackendOptions("mlx", "demo"))
    recorded_ids = {}
    try:
        for name, prompt in conversations().items():
            chunks = [chunk async for chunk in backend.complete(greedy(prompt, MAX_TOKENS))]
            recorded_ids[name] = [token for chunk in chunks for token in chunk.tokens]
            print(f"{name}: {ENCODING.decode(recorded_ids[name])!r}")
    finally:
        await backend.aclose()
    lines = (f"{json.dumps(name, ensure_ascii=False)}: {ids}" for name, ids in recorded_ids.items())
    RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    asyncio.run(record())
