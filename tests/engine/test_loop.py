"""The tool loop: calls the gateway makes itself, and the answer that goes on behind them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.engine.hosting import ANSWER, ENCODING, SEARCH, Talk, calls_of
from tests.engine.scripted import IDS, TEXT
from tests.harmony.fold import items_of
from tests.harmony.recoveries import F, R
from unisono.core.generation import Capabilities


@pytest.mark.parametrize("told", [IDS, replace(IDS, stop_visible=False), TEXT], ids=["ids", "ids, stop hidden", "text"])
@pytest.mark.parametrize("per_chunk", [1, 4, 1000])
async def test_a_call_is_made_and_the_answer_goes_on_behind_its_result(told: Capabilities, per_chunk: int) -> None:
    talk = Talk([SEARCH, ANSWER], told=told, per_chunk=per_chunk)
    events, _ = await talk.events()
    assert talk.host.made == [("docs", "search", {"q": "one"})]
    assert calls_of(events) == [("docs", "search", "search of one")]
    assert items_of(events) == (R("I look."), R("Now."), F("It is so."))
    first, second = (list(base.prompt.tokens) for base in talk.bases)
    output = ENCODING.encode_as_server(SEARCH)
    result = ENCODING.encode_marked(
        "<|start|>functions.docs__search to=assistant<|channel|>commentary<|message|>search of one<|end|>"
    )
    assert second == [*first, *output, *result, *ENCODING.encode_marked("<|start|>assistant")]
