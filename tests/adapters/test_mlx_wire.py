"""Tests of the messages between gateway and mlx engine, and of the backend's imports."""

from __future__ import annotations

import subprocess
import sys
from types import MappingProxyType

import pytest

from unisono.core.generation import AnyJson, JsonSchema, OneOf, Sampling
from unisono.core.ports import BackendOptions
from unisono.errors import ConfigError
from unisono_adapters.mlx.mlx_backend import MlxLocalBackend
from unisono_adapters.mlx.wire import (
    Cancel,
    Count,
    CountAnswer,
    Encoded,
    Failed,
    GenerateCommand,
    Pulse,
    Ready,
    RequestRefused,
    ToEngine,
    ToGateway,
    Tokenize,
    TokenOutput,
    WireError,
    from_line,
    to_line,
)

MESSAGES: dict[str, ToEngine | ToGateway] = {
    "generate": GenerateCommand(3, [200006, 5], 10, Sampling(seed=2**63, logit_bias={5: -1.5, 200002: 3.0}), "tenant"),
    "cancel": Cancel(3),
    "tokenize": Tokenize(4, ["a\nb", "\u2028 \U0001f642"]),
    "generate with a schema": GenerateCommand(
        3, [5], 10, Sampling(), constraint=JsonSchema({"enum": ["é", None, 1.5], "$ref": "#/a"})
    ),
    "generate any JSON": GenerateCommand(3, [5], 10, Sampling(), constraint=AnyJson()),
    "generate a choice": GenerateCommand(3, [5], 10, Sampling(), constraint=OneOf(("a", '"\n'))),
    "ready": Ready(131072, guides=True),
    "ready without a context": Ready(None),
    "failed": Failed("no\nmodel"),
    "output": TokenOutput(3, [5, 200002], "stop", 17),
    "output without a finish reason": TokenOutput(3, [5]),
    "refused": RequestRefused(3, "context", "too long"),
    "encoded": Encoded(4, [[1, 2], []]),
    "count": Count(5),
    "counted": CountAnswer(5, 2, 1, 300),
    "pulse": Pulse(),
}


@pytest.mark.parametrize("message", MESSAGES.values(), ids=MESSAGES)
def test_message_is_one_line_and_round_trips(message: ToEngine | ToGateway) -> None:
    line = to_line(message)

    assert line.index(b"\n") == len(line) - 1
    assert from_line(line) == message


def test_other_sequence_and_mapping_types_are_sent() -> None:
    sent = GenerateCommand(0, range(3), 1, Sampling(logit_bias=MappingProxyType({7: 1.0})))

    assert from_line(to_line(sent)) == GenerateCommand(0, [0, 1, 2], 1, Sampling(logit_bias={7: 1.0}))


GARBAGE = {
    "empty": b"\n",
    "not JSON": b"{kind: ask}\n",
    "not an object": b"[1]\n",
    "no kind": b'{"id": 1}\n',
    "unknown kind": b'{"kind": "reboot"}\n',
    "missing field": b'{"kind": "output", "id": 1}\n',
    "extra field": b'{"kind": "cancel", "id": 1, "force": true}\n',
    "extra sampling field": b'{"kind":"ask","id":1,"prompt":[],"max_tokens":1,"sampling":{"logit_bias":{},"x":1}}',
    "not UTF-8": b'{"kind": "\xff"}\n',
}


@pytest.mark.parametrize("line", GARBAGE.values(), ids=GARBAGE)
def test_invalid_line_is_a_wire_error(line: bytes) -> None:
    with pytest.raises(WireError):
        from_line(line)


def test_importing_the_backend_loads_no_engine_packages() -> None:
    program = (
        "import sys, unisono_adapters.mlx.mlx_backend, unisono_adapters.demo;"
        "print(*sorted({'mlx', 'mlx_lm', 'numpy', 'tokenizers', 'transformers'} & sys.modules.keys()))"
    )
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert loaded.stdout.split() == []


@pytest.mark.parametrize("value", ["8", -1, True, None], ids=repr)
def test_option_that_is_not_a_number_is_a_config_error(value: object) -> None:
    with pytest.raises(ConfigError, match="batch"):
        MlxLocalBackend(BackendOptions("mlx", "demo", extra={"batch": value}))
