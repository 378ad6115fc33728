"""One storm: a gateway, groups of unlike backends, and many talks at once while connections and processes break. Every
talk comes to what it comes to without any of it, or the storm says which one did not and how to see it again."""

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
PATIENCE_S = 4.0
"""For the next token: longer than a busy machine keeps anybody waiting for its turn."""
CALM_PATIENCE_S = 30.0
"""The same where nothing is to happen."""
MOST_FAULTS = 3
PAID = 2
"""Second tries in one group that its budget has to pay: more of them, and clients are told to come back later."""
SEEN_FROM = 4
"""Events behind which some token was surely read."""
DEATHS = ("reset", "close", "half", "garbage", "error200", "http500", "kill")
SONG = load_encoding().encode_marked("<|channel|>final<|message|>" + "la " * 20_000)
CANARY = "gpt-oss-canary"
CALM = "gpt-oss-calm-"


@dataclass
class Drawn:
    """A talk and what happens to it."""

    talk: Talk
    group: str
    kinds: Sequence[str]
    surface: str
    faults: list[Fault]
    doomed: bool = False
    """Whether the faults are more than anybody can make up for; then its group is asked in order."""

    def __str__(self) -> str:
        faults = ", ".join(map(str, self.faults)) or "no fault of its own"
        return f"{self.talk.name} on {self.surface}, {' + '.join(self.kinds)}: {faults}"


@dataclass
class Weather:
    """What a storm came to. `gaps_s` are those between the tokens of the stream that nothing happened to."""

    seed: int
    talks: int = 0
    fired: int = 0
    failovers: int = 0
    again: int = 0
    """Talks that were asked for twice."""
    gaps_s: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @property
    def p99_s(self) -> float:
        return sorted(self.gaps_s)[int(len(self.gaps_s) * 0.99)] if self.gaps_s else 0.0


def drawn(seed: int, talks: int = TALKS) -> list[Drawn]:
    """What a seed stands for."""
    dice = Random(seed)
    groups = [(f"gpt-oss-{number}", dice.sample(SLOTS, dice.choice((2, 2, 3)))) for number in range(6)]
    groups += [(f"gpt-oss-ids-{n}", dice.sample([s for s in SLOTS if KINDS[s.split()[0]].ids], 2)) for n in range(2)]
    found = []
    paid = dict.fromkeys((name for name, _ in groups), 0)
    for number in range(talks):
        group, slots = groups[number % len(groups)]
        # llama.cpp gives the bytes of a character together, with one id.
        exact = "ids" in group and "llamacpp" not in slots
        topic = dice.choice(IDS_ONLY_TOPICS if exact else ["literals"] if "ids" in group else TOPICS)
        one = talk(topic, seed, number, "x")
        responses_only = topic in ("hosted", "follows")
        surface = dice.choice([name for name in SURFACES if name not in STATELESS or not responses_only])
        faults = [_fault(dice, one) for _ in range(dice.randrange(MOST_FAULTS + 1))]
        # What was never begun is tried once on every deployment.
        unseen = len(slots) - 1
        for at, fault in enumerate(faults):
            if fault.kind == "slow" or _is_seen(fault):
                continue
            unseen -= 1
            paid[group] += at > 0 or fault.kind not in DEATHS
            if unseen < 0 or paid[group] > PAID:
                faults = faults[:at]
                break
        found.append(Drawn(one, group, slots, surface, faults))
    return found


def _fault(dice: Random, one: Talk) -> Fault:
    kind = dice.choice((*ENDINGS, *ENDINGS, *REFUSALS, "mute", "slow", *(GRIPS if dice.random() < 0.3 else ())))
    after_s = dice.choice((None, 1.0)) if kind in REFUSALS else None
    return Fault(kind, dice.choice((dice.randrange(4), dice.randrange(one.tokens))), after_s)


def _is_seen(fault: Fault) -> bool:
    """Whether tokens came before it, so that there is something to go on behind."""
    return fault.at >= SEEN_FROM and fault.kind not in (*REFUSALS, "mute")


async def storm(rack: Rack, upstream: Upstream, seed: int, *, talks: int = TALKS, only: int | None = None) -> Weather:
    """What a seed stands for; `only` one talk of it where a number is given."""
    return await blow(rack, upstream, [one for one in drawn(seed, talks) if only in (None, one.talk.number)])


async def blow(rack: Rack, upstream: Upstream, todo: Sequence[Drawn]) -> Weather:
    """All of it at once."""
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
            await _told(running, rack, upstream, todo, plan, weather)
            await rack.settled()
            weather.failures += await _left(running)
        weather.failures += await _open(proxies)
        weather.failures += [str(e) for one in proxies.values() for e in one.failures]
    weather.failures += [f"a backend was asked what no script goes on from: {line}" for line in rack.lost]
    (rack.folder / "lost.txt").unlink(missing_ok=True)
    weather.fired = plan.fired
    return weather


def _config(
    proxies: Mapping[tuple[str, str], Proxy], song: FakeVllm, upstream: Upstream, ordered: Mapping[str, Sequence[str]]
) -> dict[str, Any]:
    def entry(group: str, kind: str, url: str) -> dict[str, Any]:
        # No doomed talk has a fault that must time out. With a short limit, a busy machine would move its beginning to
        # the second backend, and a text backend cannot tell a spelled marker from a real one.
        is_patient = group in ordered or group.startswith((CALM, CANARY))
        patience_s = CALM_PATIENCE_S if is_patient else PATIENCE_S
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


async def _told(
    running: Gateway, rack: Rack, upstream: Upstream, todo: Sequence[Drawn], plan: FaultPlan, weather: Weather
) -> None:
    places = asyncio.Semaphore(AT_ONCE)

    async def told(one: Drawn, run: str, model: str) -> Outcome | BaseException:
        it = talk(one.talk.topic, one.talk.seed, one.talk.number, run)
        dice = Random(f"{one.talk.seed} {one.talk.number} {run}")
        async with places:
            try:
                async with asyncio.timeout(LONGEST_S):
                    before = rack.grips - rack.short
                    outcome = await SURFACES[one.surface](running, model, it, dice)
                    if rack.grips > before and _never_begun(one, outcome):
                        weather.again += 1
                        outcome = await SURFACES[one.surface](running, model, it, dice)
                    return outcome
            except Exception as error:
                return error

    calm = await asyncio.gather(*(told(one, "c", CALM + one.kinds[0].replace(" ", "-")) for one in todo))
    plan.planned = {one.talk.name: list(one.faults) for one in todo}
    async with singing(running, CANARY) as canary:
        wild = await asyncio.gather(*(told(one, "x", one.group) for one in todo))
        weather.gaps_s = canary.gaps_s[2:]
    for one, quiet, loud in zip(todo, calm, wild, strict=True):
        wrong = [f"undisturbed: {each}" for each in differences(_named(one, "c"), quiet, None)]
        if one.doomed:
            wrong += not_a_beginning(one.talk, loud)
        else:
            wrong += differences(one.talk, loud, quiet if isinstance(quiet, Outcome) else None, exact=_counts(one))
        if one.talk.topic == "hosted" and (count := len(upstream.noted(f"echo {one.talk.note}"))) != 1:
            wrong.append(f"its tool was run {count} times")
        if isinstance(loud, Outcome):
            weather.failovers += loud.note.get("failovers", 0)
        if wrong:
            again = f'make chaos ARGS="--seed {weather.seed} --talk {one.talk.number}"'
            weather.failures.append("\n  ".join([str(one), *wrong, again]))


def _never_begun(one: Drawn, outcome: Outcome) -> bool:
    """Whether it was refused because a process that was gone was one too many: what was never begun is tried once on
    every deployment, and then it is for the client to ask again."""
    refused = sum(fault.kind != "slow" and not _is_seen(fault) for fault in one.faults)
    said = outcome.reasoning or outcome.text or outcome.calls
    return bool(outcome.error) and not said and refused >= len(one.kinds) - 1 and not one.doomed


def _named(one: Drawn, run: str) -> Talk:
    return talk(one.talk.topic, one.talk.seed, one.talk.number, run)


def _counts(one: Drawn) -> bool:
    """Whether it is known how many tokens of it are generated: text is cut into tokens again, and what comes behind the
    place where a header was to be forced depends on when it came."""
    return one.talk.topic not in ("named", "required", "schema") and all(
        KINDS[slot.split()[0]].ids for slot in one.kinds
    )


def differences(one: Talk, outcome: Outcome | BaseException, calm: Outcome | None, *, exact: bool = True) -> list[str]:
    """What is not as it should be: by the script, and by the undisturbed run."""
    if isinstance(outcome, BaseException):
        return ["".join(traceback.format_exception(outcome))[-3000:]]
    found = [*outcome.ledger]
    if outcome.error:
        found.append(f"the client was told {outcome.error}")
    if one.topic != "cut":
        wanted = {"reasoning": one.reasoning, "text": one.text, "calls": one.calls}
        found += [f"{what} is {has!r}, not {should!r}" for what, should in wanted.items()
                  if (has := getattr(outcome, what)) != should]  # fmt: skip
    if calm is not None:
        names = ["finish", *(["generated"] if exact else []), *(["text", "reasoning"] if one.topic == "cut" else [])]
        for what in names:
            if getattr(outcome, what) != getattr(calm, what):
                found.append(f"{what} is {getattr(outcome, what)!r}, undisturbed {getattr(calm, what)!r}")
    return found


def not_a_beginning(one: Talk, outcome: Outcome | BaseException) -> list[str]:
    """What is wrong with an answer that could not be finished: it has to be the beginning of the whole one, and say why
    it is no more."""
    if isinstance(outcome, BaseException):
        return ["".join(traceback.format_exception(outcome))[-3000:]]
    found = list(outcome.ledger)
    if not outcome.error:
        found.append("nobody said that it is not whole")
    for what in ("reasoning", "text"):
        if not getattr(one, what).startswith(has := getattr(outcome, what)):
            found.append(f"{what} is {has!r}, no beginning of {getattr(one, what)!r}")
    if not outcome.reasoning:
        found.append("what there was of it was not shown")
    return found


async def _left(running: Gateway) -> list[str]:
    """What is still going on although every client has its answer."""
    assert running.app is not None
    pool = running.app.state.gateway.pool
    found: list[str] = []
    for _ in range(100):
        found = [str(one) for one in pool.status() if one.running or one.waiting or one.tokens]
        if not found:
            break
        await asyncio.sleep(0.05)
    return [f"still in the pool: {one}" for one in found]


async def _open(proxies: Mapping[tuple[str, str], Proxy]) -> list[str]:
    found: dict[tuple[str, str], int] = {}
    for _ in range(40):
        found = {name: proxy.open for name, proxy in proxies.items() if proxy.open}
        if not found:
            break
        await asyncio.sleep(0.05)
    return [f"{count} connections of {name} are still open" for name, count in found.items()]
