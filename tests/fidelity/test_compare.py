"""`unisono compare` against servers with a scripted model: healthy, rounded and faulty."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests.e2e.gateway import config_of, gateway
from tests.fakes import FakeVllm, Refusal
from tests.fakes.language_model import HEADER, Distribution, Fault, LanguageModel, healthy
from tests.fakes.ollama import FakeOllama
from tests.web.test_routes import recordings
from unisono.cli import main
from unisono.core.generation import CHANNEL
from unisono.core.route_protocol import DEPLOYMENT_HEADER
from unisono.fidelity.comparison import Place, places_of
from unisono.harmony.encoding import load_encoding

QUESTIONS = [f"Question {number}?" for number in range(6)]


def rounded(prompt: Sequence[int], position: int, distribution: Distribution) -> Distribution:
    """Change probabilities as little as other kernels do."""
    return {token: value - 0.0001 * ((token + position) % 3) for token, value in distribution.items()}


def corrupted_token(prompt: Sequence[int], position: int, distribution: Distribution) -> Distribution:
    if position != len(HEADER) + 2:
        return distribution
    return {4711: -0.1} | {token: value - 3 for token, value in distribution.items()}


def dropped_header(prompt: Sequence[int], position: int, distribution: Distribution) -> Distribution:
    return distribution if position else dict.fromkeys(distribution, -9.0) | {HEADER[2]: -0.01}


def sharpened(prompt: Sequence[int], position: int, distribution: Distribution) -> Distribution:
    return {token: value * 1.2 for token, value in distribution.items()}


async def compared(tmp_path: Path, fault: Fault, *arguments: str) -> Result:
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"name": text, "messages": [{"role": "user", "content": text}]} for text in QUESTIONS]
    prompts.write_text("\n".join(map(json.dumps, rows)))
    async with FakeVllm(script=LanguageModel().script) as first, FakeVllm(script=LanguageModel(fault).script) as second:
        names = [f"vllm/tiny@{server.url}" for server in (first, second)]
        command = ["compare", *names, "--prompts", str(prompts), *arguments]
        return await asyncio.to_thread(CliRunner().invoke, main, command)


@pytest.mark.parametrize("fault", [healthy, rounded])
async def test_equal_models_are_equal(fault: Fault, tmp_path: Path) -> None:
    result = await compared(tmp_path, fault, "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["equal"]
    assert report["total"]["agreement"]["value"] == 1
    assert (report["answers"], report["unscored"], report["divergences"]) == (len(QUESTIONS), 0, [])
    assert report["total"]["best"]["value"] == 1


@pytest.mark.parametrize(
    ("fault", "position", "place"),
    [(corrupted_token, 5, "analysis"), (dropped_header, 0, "marker"), (sharpened, 3, "analysis")],
)
async def test_a_faulty_model_is_named_with_its_first_token(
    fault: Fault, position: int, place: str, tmp_path: Path
) -> None:
    result = await compared(tmp_path, fault, "--json")
    assert result.exit_code == 1, result.output
    report = json.loads(result.stdout)
    assert not report["equal"]
    first = report["divergences"][0]
    assert (first["position"], first["place"]) == (position, place)
    assert report["places"][place]["divergence"]["value"] > 0.0005


async def test_the_report_shows_the_token_in_its_context(tmp_path: Path) -> None:
    result = await compared(tmp_path, dropped_header)
    assert result.exit_code == 1
    assert "token 0 (marker): '<|message|>' instead of '<|channel|>'" in result.stdout
    assert ">><|channel|><< analysis<|message|>" in result.stdout
    assert "DIFFERENT: beyond the limit of agreement and divergence" in result.stdout


async def test_limits_decide_the_exit_code(tmp_path: Path) -> None:
    limits = ("--min-agreement", "0.5", "--max-divergence", "5")
    assert (await compared(tmp_path, corrupted_token, *limits)).exit_code == 0


BAD_PROMPTS = {
    "not JSON": ("{", "line 1: not valid JSON"),
    "no object": ("[]", "line 1: must be an object"),
    "no messages": ('{"name": "x"}', "line 1: messages"),
    "an unknown role": ('{"messages": [{"role": "user", "content": "a"}]}\n{"messages": [{"role": 3}]}', "line 2: "),
}


@pytest.mark.parametrize("name", BAD_PROMPTS)
def test_a_bad_prompt_is_named_by_its_line(name: str, tmp_path: Path) -> None:
    text, message = BAD_PROMPTS[name]
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    result = CliRunner().invoke(main, ["compare", "vllm/a@http://x", "vllm/b@http://y", "--prompts", str(path)])
    assert result.exit_code == 2
    assert message in result.stderr


async def test_backends_that_cannot_be_compared_are_named(tmp_path: Path) -> None:
    async def failed(first: str, second: str) -> str:
        result: Any = await asyncio.to_thread(CliRunner().invoke, main, ["compare", first, second])
        assert result.exit_code == 2, result.output
        return str(result.stderr)

    async with (
        FakeVllm(script=LanguageModel().script) as vllm,
        FakeOllama(text="<|channel|>final<|message|>Hi") as ollama,
        FakeVllm(script=lambda asked: Refusal(500, b"{}")) as broken,
    ):
        good = f"vllm/tiny@{vllm.url}"
        assert "this backend does not score given tokens" in await failed(good, f"ollama/x@{ollama.url}")
        assert "Error: " in await failed(f"vllm/tiny@{broken.url}", good)
        assert "a deployment needs --config" in await failed(good, "vllm-2")


async def test_a_backend_that_fails_while_scoring_ends_the_comparison_with_its_error(tmp_path: Path) -> None:
    model, asked = LanguageModel(), ["first"]

    def first(request: Any) -> Any:
        asked.append("first")
        return model.script(request)

    def second(request: Any) -> Any:
        # After the probes of both backends, the first one generates the answers.
        if asked[-1] == "first" and "second" in asked:
            return Refusal(500, b"{}")
        asked.append("second")
        return model.script(request)

    async with FakeVllm(script=first) as generating, FakeVllm(script=second) as failing:
        names = [f"vllm/tiny@{server.url}" for server in (generating, failing)]
        result = await asyncio.to_thread(CliRunner().invoke, main, ["compare", *names, "--max-tokens", "1"])
    assert result.exit_code == 2, result.output
    assert "Error: " in result.stderr


def test_the_bundled_prompts_can_be_rendered() -> None:
    from unisono.cli.compare import chat_prompts

    prompts = chat_prompts(None)
    assert len({name for name, _ in prompts}) == len(prompts) == 30
    assert all(load_encoding().decode(tokens).endswith("<|start|>assistant") for _, tokens in prompts)


def test_every_token_has_a_place() -> None:
    encoding = load_encoding()
    text = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.f "
        "<|constrain|>json<|message|>{}<|call|>"
    )
    tokens = encoding.encode_marked(text)
    places = places_of(encoding, tokens)
    spelled = {
        place: encoding.decode([token for token, at in zip(tokens, places, strict=True) if at is place])
        for place in Place
    }
    assert spelled[Place.ANALYSIS] == "Hm."
    assert spelled[Place.COMMENTARY] == "{}"
    assert spelled[Place.HEADER] == "analysisassistantcommentary to=functions.f json"
    assert spelled[Place.MARKER].count("<|") == 8
    # A prompt that leaves a message open decides the place of the first tokens.
    assert places_of(encoding, encoding.encode_text("Yes"), [CHANNEL, *encoding.encode_marked("final<|message|>")]) == [
        Place.FINAL
    ]


@pytest.mark.parametrize(("fault", "code"), [(healthy, 0), (corrupted_token, 1)])
async def test_recorded_answers_are_compared(fault: Fault, code: int, tmp_path: Path) -> None:
    """The recordings of a gateway are scored on two backends, neither of which generates."""
    async with FakeVllm(script=LanguageModel(fault).script) as live, FakeVllm(script=LanguageModel().script) as other:
        config = {
            **config_of(f"vllm@{live.url}", f"vllm@{other.url}", unisono={"traces": {"mode": "all"}}),
            "store": {"url": f"sqlite://{tmp_path}/state.db"},
        }
        async with gateway(config) as running:
            for text in QUESTIONS:
                body = {"model": "gpt-oss", "messages": [{"role": "user", "content": text}], "temperature": 0}
                answer = await running.post(
                    "/v1/chat/completions", json.dumps(body).encode(), **{DEPLOYMENT_HEADER: "vllm-1"}
                )
                assert answer.status == 200
            await recordings(running, len(QUESTIONS))
        path = tmp_path / "config.yaml"
        # JSON is YAML.
        path.write_text(json.dumps(config))
        live.requests.clear()
        command = ["compare", "vllm-2", "vllm-1", "--config", str(path), "--traces", "4", "--json"]
        result = await asyncio.to_thread(CliRunner().invoke, main, command)
    assert result.exit_code == code, result.output
    report = json.loads(result.stdout)
    assert report["answers"] == 4
    assert report["equal"] is not bool(code)
    assert all(seen.json.get("echo") for seen in live.requests if not seen.is_probe)
