"""One storm: a gateway, mixed backend groups and many concurrent talks with faults.

Connections and processes break while the talks run. Every talk must have the same result as without faults. Otherwise
the storm names the talk and the command that repeats it.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from random import Random
from typing import Any

from tests.chaos.backend import KINDS
from tests.chaos.clients import LONGEST_S, STATELESS, SURFACES, Outcome
from tests.chaos.proxy import ENDINGS, GRIPS, REFUSALS, Fault, Proxy
from tests.chaos.rack import FaultPlan, Rack
from tests.chaos.talks import IDS_ONLY_TOPICS, TOPICS, Talk, talk
from tests.e2e.canary import STEP_S, singing
from tests.e2e.gateway import Gateway, gateway
from tests.e2e.hosting import hosts
from tests.fakes import FakeVllm, VllmScript
from tests.mcp.conftest import Upstream
from unisono.harmony.encoding import load_encoding

SLOTS = ["vllm 1", "vllm 2", "sglang", "llamacpp", "ollama", "mlx_server"]
TALKS = 36
AT_ONCE = 12
# Token timeout; longer than the scheduling delays of a busy machine.
PATIENCE_S = 4.0
# Token timeout where no fault occurs.
CALM_PATIENCE_S = 30.0
MOST_FAULTS = 3
# Retries in one group that its retry budget has to cover. With more, clients get a 503 with Retry-After.
PAID = 2
# After this number of events, the gateway has certainly read some token.
SEEN_FROM = 4
DEATHS = ("reset", "close", "half", "garbage", "error200", "http500", "kill")
SONG = load_encoding().encode_marked("<|channel|>final<|message|>" + "la " * 20_000)
CANARY = "gpt-oss-canary"
CALM = "gpt-oss-calm-"


@dataclass
class Drawn:
    """One talk and its faults."""

    talk: Talk
    group: str
    kinds: Sequence[str]
    surface: str
    faults: list[Fault]
    # The faults exceed what failover can recover from. The group is then tried in order.
    doomed: bool = False

    def __str__(self) -> str:
        faults = ", ".join(map(str, self.faults)) or "no fault"
        return f"{self.talk.name} on {self.surface}, {' + '.join(self.kinds)}: {faults}"


@dataclass
class Weather:
    """Result of a storm. `gaps_s` are the times between the tokens of the undisturbed stream."""

    seed: int
    talks: int = 0
    fired: int = 0
    failovers: int = 0
    # Number of talks that the client requested twice.
    again: int = 0
    gaps_s: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @property
    def p99_s(self) -> float:
        return sorted(self.gaps_s)[int(len(self.gaps_s) * 0.99)] if self.gaps_s else 0.0


def drawn(seed: int, talks: int = TALKS) -> list[Drawn]:
    """Return the talks of a seed."""
    dice = Random(seed)
    groups = [(f"gpt-oss-{number}", dice.sample(SLOTS, dice.choice((2, 2, 3)))) for number in range(6)]
    groups += [(f"gpt-oss-ids-{n}", dice.sample([s for s in SLOTS if KINDS[s.split()[0]].ids], 2)) for n in range(2)]
    found = []
    paid = dict.fromkeys((name for name, _ in groups), 0)
    for number in range(talks):
        group, slots = groups[number % len(groups)]
        # llama.cpp sends the bytes of a character together, with one id.
        exact = "ids" in group and "llamacpp" not in slots
        topic = dice.choice(IDS_ONLY_TOPICS if exact else ["literals"] if "ids" in group else TOPICS)
        drawn_talk = talk(topic, seed, number, "x")
        responses_only = topic in ("hosted", "follows")
        surface = dice.choice([name for name in SURFACES if name not in STATELESS or not responses_only])
        faults = [_fault(dice, drawn_talk) for _ in range(dice.randrange(MOST_FAULTS + 1))]
        # A request without output is tried once on every deployment.
        free_attempts = len(slots) - 1
        for at, fault in enumerate(faults):
            if fault.kind == "slow" or _is_seen(fault):
                continue
            free_attempts -= 1
            paid[group] += at > 0 or fault.kind not in DEATHS
            if free_attempts < 0 or paid[group] > PAID:
                faults = faults[:at]
                break
        found.append(Drawn(drawn_talk, group, slots, surface, faults))
    return found


def _fault(dice: Random, one: Talk) -> Fault:
    kind = dice.choice((*ENDINGS, *ENDINGS, *REFUSALS, "mute", "slow", *(GRIPS if dice.random() < 0.3 else ())))
    after_s = dice.choice((None, 1.0)) if kind in REFUSALS else None
    return Fault(kind, dice.choice((dice.randrange(4), dice.randrange(one.tokens))), after_s)


def _is_seen(fault: Fault) -> bool:
    """Whether tokens arrive in front of the fault, so that there is output to continue."""
    return fault.at >= SEEN_FROM and fault.kind not in (*REFUSALS, "mute")


async def storm(rack: Rack, upstream: Upstream, seed: int, *, talks: int = TALKS, only: int | None = None) -> Weather:
    """Run the storm of a seed, or one talk of it if `only` is a number."""
    return await blow(rack, upstream, [one for one in drawn(seed, talks) if only in (None, one.talk.number)])


async def blow(rack: Rack, upstream: Upstream, todo: Sequence[Drawn]) -> Weather:
    """Run all given talks concurrently and check their results."""
    plan = FaultPlan()
    weather = Weather(todo[0].talk.seed, len(todo))
    async with AsyncExitStack() as stack:
        song = await stack.enter_async_context(FakeVllm(script=lambda asked: VllmScript(tokens=SONG, delay_s=STEP_S)))
        proxies = {}
        for name in sorted({(one.group, slot) for one in todo for slot in one.kinds}):
            proxies[name] = await stack.enter_async_context(rack.proxy(name[1], plan))
        for slot in sorted({one.kinds[0] for one in todo}):
            name = (CALM + slot.replace(" ", "-"), slot)
            proxies[name] = await stack.enter_async_context(rack.proxy(slot, plan))
        doomed = {one.group: one.kinds for one in todo if one.doomed}
        async with gateway(_config(proxies, song, upstream, doomed)) as running:
            # A deployment that is not probed yet ranks behind a probed one, whatever its order.
            await _all_probed(running)
            await _run_talks(running, rack, upstream, todo, plan, weather)
            await rack.settled()
            weather.failures += await _busy_deployments(running)
        weather.failures += await _open_connections(proxies)
        weather.failures += [str(e) for one in proxies.values() for e in one.failures]
    weather.failures += [f"no script continues a prompt: {line}" for line in rack.lost]
    (rack.folder / "lost.txt").unlink(missing_ok=True)
    weather.fired = plan.fired
    return weather


def _config(
    proxies: Mapping[tuple[str, str], Proxy], song: FakeVllm, upstream: Upstream, ordered: Mapping[str, Sequence[str]]
) -> dict[str, Any]:
    def entry(group: str, kind: str, url: str) -> dict[str, Any]:
        patience_s = CALM_PATIENCE_S if group.startswith((CALM, CANARY)) else PATIENCE_S
        params = {"model": f"{kind}/tiny", "api_base": url, "stream_timeout": patience_s, "timeout": LONGEST_S}
        return {
            "model_name": group,
            "litellm_params": params,
            "unisono": {"first_token_timeout_s": patience_s, "connect_timeout_s": patience_s},
        }

    entries = [entry(group, proxy.kind, proxy.url) for (group, _), proxy in proxies.items()]
    for (group, slot), one in zip(proxies, entries, strict=True):
        if group in ordered:
            one["litellm_params"]["order"] = ordered[group].index(slot)
    return {
        "model_list": [*entries, entry(CANARY, "vllm", song.url)],
        "router_settings": {"num_retries": 8, "cooldown_time": 1.0},
        **hosts(upstream),
    }


async def _run_talks(
    running: Gateway, rack: Rack, upstream: Upstream, todo: Sequence[Drawn], plan: FaultPlan, weather: Weather
) -> None:
    slots = asyncio.Semaphore(AT_ONCE)

    async def run_talk(one: Drawn, run: str, model: str) -> Outcome | BaseException:
        named_talk = talk(one.talk.topic, one.talk.seed, one.talk.number, run)
        dice = Random(f"{one.talk.seed} {one.talk.number} {run}")
        async with slots:
            try:
                async with asyncio.timeout(LONGEST_S):
                    before = rack.grips - rack.short
                    outcome = await SURFACES[one.surface](running, model, named_talk, dice)
                    if rack.grips > before and _never_begun(one, outcome):
                        weather.again += 1
                        outcome = await SURFACES[one.surface](running, model, named_talk, dice)
                    return outcome
            except Exception as error:
                return error

    undisturbed = await asyncio.gather(*(run_talk(one, "c", CALM + one.kinds[0].replace(" ", "-")) for one in todo))
    plan.planned = {one.talk.name: list(one.faults) for one in todo}
    async with singing(running, CANARY) as canary:
        disturbed = await asyncio.gather(*(run_talk(one, "x", one.group) for one in todo))
        weather.gaps_s = canary.gaps_s[2:]
    for one, expected, actual in zip(todo, undisturbed, disturbed, strict=True):
        wrong = [f"undisturbed: {each}" for each in differences(_talk_of_run(one, "c"), expected, None)]
        if one.doomed:
            wrong += not_a_beginning(one.talk, actual)
        else:
            wrong += differences(
                one.talk, actual, expected if isinstance(expected, Outcome) else None, exact=_has_exact_count(one)
            )
        if one.talk.topic == "hosted" and (count := len(upstream.noted(f"echo {one.talk.note}"))) != 1:
            wrong.append(f"its server tool was run {count} times")
        if isinstance(actual, Outcome):
            weather.failovers += actual.note.get("failovers", 0)
        if wrong:
            again = f'make chaos ARGS="--seed {weather.seed} --talk {one.talk.number}"'
            weather.failures.append("\n  ".join([str(one), *wrong, again]))


def _never_begun(one: Drawn, outcome: Outcome) -> bool:
    """Whether a request failed without output because a killed process was one failure too many.

    An answer without output is tried once on every deployment. After that, the client has to retry.
    """
    refused = sum(fault.kind != "slow" and not _is_seen(fault) for fault in one.faults)
    said = outcome.reasoning or outcome.text or outcome.calls
    return bool(outcome.error) and not said and refused >= len(one.kinds) - 1 and not one.doomed


def _talk_of_run(one: Drawn, run: str) -> Talk:
    return talk(one.talk.topic, one.talk.seed, one.talk.number, run)


def _has_exact_count(one: Drawn) -> bool:
    """Whether the number of generated tokens is predictable.

    Text backends tokenize the text again. The tokens after a forced header depend on the time of the forcing.
    """
    return one.talk.topic not in ("named", "required", "schema") and all(
        KINDS[slot.split()[0]].ids for slot in one.kinds
    )


def differences(one: Talk, outcome: Outcome | BaseException, calm: Outcome | None, *, exact: bool = True) -> list[str]:
    """Return the differences from the script and from the undisturbed outcome."""
    if isinstance(outcome, BaseException):
        return ["".join(traceback.format_exception(outcome))[-3000:]]
    found = [*outcome.ledger]
    if outcome.error:
        found.append(f"the client received the error {outcome.error}")
    if one.topic != "cut":
        expected = {"reasoning": one.reasoning, "text": one.text, "calls": one.calls}
        found += [f"{what} is {has!r}, not {should!r}" for what, should in expected.items()
                  if (has := getattr(outcome, what)) != should]  # fmt: skip
    if calm is not None:
        names = ["finish", *(["generated"] if exact else []), *(["text", "reasoning"] if one.topic == "cut" else [])]
        for what in names:
            if getattr(outcome, what) != getattr(calm, what):
                found.append(f"{what} is {getattr(outcome, what)!r}, undisturbed {getattr(calm, what)!r}")
    return found


def not_a_beginning(one: Talk, outcome: Outcome | BaseException) -> list[str]:
    """Return the faults of an answer that could not be finished.

    It has to be a prefix of the whole answer and end with an error.
    """
    if isinstance(outcome, BaseException):
        return ["".join(traceback.format_exception(outcome))[-3000:]]
    found = list(outcome.ledger)
    if not outcome.error:
        found.append("the incomplete answer has no error")
    for what in ("reasoning", "text"):
        if not getattr(one, what).startswith(has := getattr(outcome, what)):
            found.append(f"{what} is {has!r}, no prefix of {getattr(one, what)!r}")
    if not outcome.reasoning:
        found.append("the output before the fault was not sent")
    return found


async def _busy_deployments(running: Gateway) -> list[str]:
    """Return the deployments that still run requests after every client has its response."""
    assert running.app is not None
    pool = running.app.state.gateway.pool
    found: list[str] = []
    for _ in range(100):
        found = [str(one) for one in pool.status() if one.running or one.waiting or one.tokens]
        if not found:
            break
        await asyncio.sleep(0.05)
    return [f"still in the pool: {one}" for one in found]


async def _all_probed(running: Gateway) -> None:
    assert running.app is not None
    pool = running.app.state.gateway.pool
    async with asyncio.timeout(LONGEST_S):
        while any(status.state == "unknown" for status in pool.status()):
            await asyncio.sleep(0.05)


async def _open_connections(proxies: Mapping[tuple[str, str], Proxy]) -> list[str]:
    found: dict[tuple[str, str], int] = {}
    for _ in range(40):
        found = {name: proxy.open for name, proxy in proxies.items() if proxy.open}
        if not found:
            break
        await asyncio.sleep(0.05)
    return [f"{count} connections of {name} are still open" for name, count in found.items()]
