"""Contract of every backend for the scores of given tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contract.kinds import IDS, KINDS, PROMPT, Kind, collect
from tests.fakes import Refusal, WireServer
from tests.fakes.dialects import logprob_of
from unisono.core.probe import Check
from unisono.core.scoring import ScoreJob, ScoringBackend, TokenScore
from unisono.errors import BackendError
from unisono_adapters._scoring import FORCED_TOKENS, parts_of

# Kinds whose servers score given tokens. `mlx` is tested with its real engine.
SCORING_KINDS = ("vllm", "sglang", "llamacpp")
JOB = ScoreJob(PROMPT, IDS, top=3)


@pytest.fixture(params=SCORING_KINDS)
def scoring(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


def is_known(score: TokenScore | None, token: int) -> bool:
    return (
        score is not None
        and (score.token, score.logprob, score.rank) == (token, logprob_of(token), 0)
        and score.best == token
        and len(score.top) <= JOB.top
    )


async def test_every_target_has_the_score_of_the_server(scoring: Kind, tmp_path: Path) -> None:
    async with scoring.serve(tmp_path) as (backend, _):
        assert isinstance(backend, ScoringBackend)
        scores = await backend.score(JOB)
    unknown = [token for score, token in zip(scores, IDS, strict=True) if not is_known(score, token)]
    # SGLang names alternatives by their text, and these tokens are parts of a character.
    assert unknown == ([61138, 236] if scoring is KINDS["sglang"] else [])


@pytest.mark.parametrize("name", KINDS)
async def test_the_probe_tells_which_kinds_score(name: str, tmp_path: Path) -> None:
    async with KINDS[name].serve(tmp_path) as (backend, _):
        probe = await backend.probe()
    assert probe.capabilities.scores is (name in SCORING_KINDS)
    assert any(finding.check is Check.SCORES and finding.ok for finding in probe.findings) is (name in SCORING_KINDS)


async def test_the_probe_waits_for_scores_as_long_as_for_a_generation(
    scoring: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unisono_adapters._probe.ANSWER_S", 0.0)
    async with scoring.serve(tmp_path) as (backend, _):
        probe = await backend.probe()
    assert probe.capabilities.scores


async def test_answers_continue_after_scores(scoring: Kind, tmp_path: Path) -> None:
    async with scoring.serve(tmp_path) as (backend, _):
        assert isinstance(backend, ScoringBackend)
        await backend.score(JOB)
        assert scoring.delivered(await collect(backend)) == scoring.answer


@pytest.mark.parametrize("body", [b"{}", b"[]", b"no JSON", b'{"error": {"code": 500, "message": "m"}}'])
async def test_a_server_that_fails_raises_only_backend_errors(scoring: Kind, body: bytes) -> None:
    for status in (200, 400, 500):
        async with WireServer(lambda seen, status=status: Refusal(status, body).steps()) as server:  # type: ignore[misc]
            backend = scoring.at(server.url)
            assert isinstance(backend, ScoringBackend)
            try:
                scores = await backend.score(JOB)
            except BackendError:
                pass
            else:
                assert scores == [None] * len(IDS)
            finally:
                await backend.aclose()


async def test_llamacpp_without_grammars_of_tokens_forces_them_one_by_one(tmp_path: Path) -> None:
    async with KINDS["llamacpp"].serve(tmp_path) as (backend, server):
        server.forces_by_grammar = False
        assert isinstance(backend, ScoringBackend)
        scores = await backend.score(JOB)
        bodies = [seen.json for seen in server.requests if seen.path == "/completion"]
    assert all(map(is_known, scores, IDS))
    # Before each target, the server reads all earlier ones.
    prompts = [body["prompt"] for body in bodies if "logit_bias" in body]
    assert prompts == [[*PROMPT.tokens, *IDS[:at]] for at in range(len(IDS))]


@pytest.mark.parametrize(
    ("targets", "sizes"),
    [
        ([], []),
        ([1, 2, 200002], [2, 1]),
        ([200012, 1], [1, 1]),
        ([1, 200007, 200006, 2], [4]),
        ([1] * (FORCED_TOKENS + 1), [FORCED_TOKENS, 1]),
    ],
)
def test_a_stop_token_is_forced_alone(targets: list[int], sizes: list[int]) -> None:
    parts = list(parts_of(targets))
    assert [token for part in parts for token in part] == targets
    assert [len(part) for part in parts] == sizes
