"""Credentials that a backend or its proxy echoes in errors, in any encoding.

Neither clients nor logs may receive them.
"""

from __future__ import annotations

import base64
import html
import io
import json
import re
from collections.abc import Callable, Mapping
from urllib.parse import quote, quote_plus

import pytest

from tests.e2e.gateway import config_of, gateway
from tests.fakes import FakeVllm, Refusal
from unisono.config import parse
from unisono.observe.logs import start_logging
from unisono.observe.redaction import secrets_of

SECRET = "p/läntéd+k\"e'y&Z9=="
ASCII_SECRET = "Planted+K/ey&Z9=="
SPELLINGS: Mapping[str, Callable[[str], str]] = {
    "verbatim": str,
    "in a URL": lambda key: quote(key, safe=""),
    "in a path": quote,
    "in a form": quote_plus,
    "in a lower-case URL": lambda key: re.sub("%..", lambda escape: escape[0].lower(), quote(key, safe="")),
    "in JSON": lambda key: json.dumps(key)[1:-1],
    "in HTML": html.escape,
    "in base64": lambda key: base64.b64encode(key.encode()).decode(),
    "after a short user": lambda key: base64.b64encode(f"u:{key}".encode()).decode(),
    "after a user": lambda key: base64.b64encode(f"you:{key}".encode()).decode(),
    "after a long user": lambda key: base64.urlsafe_b64encode(f"somebody:{key}\n".encode()).decode(),
}


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("spell", SPELLINGS.values(), ids=SPELLINGS)
@pytest.mark.parametrize("place", ["api_key", "password"])
async def test_echoed_credentials_reach_neither_client_nor_log(place: str, spell: Callable[[str], str]) -> None:
    key = ASCII_SECRET if place == "api_key" else SECRET
    error_body = {"error": {"message": f"cannot use {spell(key)} here", "code": 400}}
    async with FakeVllm(script=lambda _: Refusal(400, json.dumps(error_body).encode())) as fake:
        config = config_of(f"vllm@{fake.url}")
        params = config["model_list"][0]["litellm_params"]
        if place == "api_key":
            params["api_key"] = key
        else:
            params["api_base"] = fake.url.replace("//", f"//you:{quote(key, safe='')}@")
        stream = io.StringIO()
        undo = start_logging("debug", secrets_of(parse({"store": {"url": "memory://"}, **config}, {}).config), stream)
        try:
            async with gateway(config) as running:
                answer = await running.chat()
        finally:
            undo()
    assert answer.status == 400, answer.raw
    visible = answer.raw.decode() + answer.body["error"]["message"]
    assert "cannot use" in visible
    for text in (visible, stream.getvalue(), *map(str, logged(stream))):
        assert not [part for part in parts(spell(key)) if part in text]


def parts(spelled: str) -> set[str]:
    """Return pieces from the middle of an encoding; its ends may mix with the surrounding text."""
    middle = spelled[len(spelled) // 2 - 4 :]
    return {middle[at : at + 6] for at in range(len(middle) - 9)}


def logged(stream: io.StringIO) -> list[object]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]
