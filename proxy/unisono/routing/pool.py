"""Pool of all live deployments: groups by model name, monitoring of health and load, status.

Deployments are probed in the background: all of them at startup, unhealthy ones every few seconds, and healthy unused
ones occasionally. Busy deployments that share a model are polled for their load.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from math import inf
from random import uniform

from unisono.core.answer_faults import AnswerFault
from unisono.core.fallback_models import NO_FALLBACK_MODELS, FallbackModels
from unisono.core.frozen import dataclass
from unisono.core.route_protocol import DEPLOYMENT_HEADER, RouteRequest
from unisono.core.tasks import cancel_and_wait
from unisono.errors import BackendUnavailable, InvalidRequest, UnisonoError, UnknownModel, UnsupportedValue
from unisono.routing.circuit_breaker import BreakerFailure, CircuitPhase, kind_of
from unisono.routing.deployment import LiveDeployment
from unisono.routing.deployment_config import DeploymentConfig
from unisono.routing.failover_route import GroupFailoverRoute
from unisono.routing.group import DeploymentGroup, RoutingRules
from unisono.routing.prefix_index import PrefixIndex
from unisono.routing.status import DeploymentStatus, status_of

WATCH_EVERY_S = 5.0
# Seconds between checks while a deployment may have died or recovered.
URGENT_EVERY_S = 1.0
PROBES_AT_ONCE = 8

LOOK_S = 0.1

LOAD_EVERY_S = 1.0
LOAD_WITHIN_S = 1.0
# Seconds after its last request during which a group is polled for its load.
LOAD_WHILE_S = 10.0
# Seconds until a server that does not report its load is polled again.
SILENT_FOR_S = 60.0


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CarriedDeployment:
    """Deployment that a pool takes over from the replaced pool, with its new configuration."""

    live: LiveDeployment
    terms: DeploymentConfig


@dataclass(eq=False, slots=True)
class WatchState:
    """Monitoring state of one deployment, with the tasks that run for it.

    Until the time `silent_until`, the server is not polled for its load, because it reports none.
    """

    live: LiveDeployment
    probe: asyncio.Task[None] | None = None
    loading: asyncio.Task[None] | None = None
    silent_until: float = 0.0


class RoutingPool:
    """Groups of deployments by model name; `fallback_models` names the fallbacks of each model.

    The pool `replaced` monitors the deployments in `carried` until `start` of this pool is called. Before that, neither
    pool changes. Requests of earlier pools may still run on a deployment, so a deployment is closed only by the last
    pool that uses it.
    """

    def __init__(
        self,
        groups: Mapping[str, Sequence[LiveDeployment]],
        rules: RoutingRules | None = None,
        *,
        fallback_models: Mapping[str, FallbackModels] | None = None,
        carried: Sequence[CarriedDeployment] = (),
        replaced: RoutingPool | None = None,
        prefixes: PrefixIndex | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rules = rules or RoutingRules()
        self.prefixes = PrefixIndex() if prefixes is None else prefixes
        self._clock = clock
        self._resources = list(carried)
        self._replaced = replaced
        taken_over = {id(one.live) for one in carried}
        # Event that wakes the task `_watch`, because a deployment should be probed now.
        self._doubts = asyncio.Event()
        # Time of the next check for due probes.
        self._watches_at = 0.0
        # Deployments that this pool monitors.
        self._owned: dict[int, WatchState] = {}
        # Deployments that stay open for the requests of this pool, even if another pool now monitors them.
        self._used: dict[int, LiveDeployment] = {}
        self._by_name: dict[str, tuple[DeploymentGroup, LiveDeployment]] = {}
        self._harmony: dict[str, DeploymentGroup] = {}
        # Groups of pass-through deployments, which answer in OpenAI's own API. The state of a deployment is the same
        # for every group that contains it.
        self._passthrough: dict[str, DeploymentGroup] = {}
        for model, members in groups.items():
            for live in members:
                if id(live) not in taken_over:
                    live.candidate.bit = self.prefixes.join()
            for passes, of_kind in ((False, self._harmony), (True, self._passthrough)):
                if kin := [live for live in members if live.passes is passes]:
                    of_kind[model] = DeploymentGroup(model, kin, self.prefixes, self.rules, clock)
        self._own([live for members in groups.values() for live in members if id(live) not in taken_over])
        self._fallback_models = dict(fallback_models or {})
        self._watching: list[asyncio.Task[None]] = []
        self._probe_slots = asyncio.Semaphore(PROBES_AT_ONCE)

    def route(self, request: RouteRequest) -> GroupFailoverRoute:
        """Return the failover route through the deployments of the requested model and kind.

        The route includes the model's fallbacks. Raises UnknownModel if the model is not configured. Raises
        UnsupportedValue in two cases: the model, or a fallback that the client chose, is a pass-through model that
        cannot answer the request; or no deployment has the requested tags. Raises InvalidRequest if the request selects
        a deployment that cannot answer it. Raises BackendUnavailable if only the other kind has a usable deployment.
        """
        groups, other = self._harmony, self._passthrough
        if request.is_passthrough:
            groups, other = other, groups
        others = self._fallback_models.get(request.model, NO_FALLBACK_MODELS)
        others = others.for_request(request.model, request.requested)
        if not request.has_both_kinds:
            for name in request.requested.fallbacks or ():
                if name not in groups and name in other:
                    raise UnsupportedValue(
                        f"The model `{name}` is a pass-through model and cannot answer this request; remove it from "
                        "'fallbacks'.",
                        param="fallbacks",
                    )
        ruled_out = 0
        if self.rules.tags is not None or request.requested.deployment:
            ruled_out = self._ruled_out(request, (request.model, *others.fallbacks, *others.larger))
        own = groups.get(request.model)
        if own is not None and ruled_out and not _is_usable(own, ruled_out):
            own = None
        fallbacks = _usable(groups, others.fallbacks, ruled_out) if others.fallbacks else ()
        larger = _usable(groups, others.larger, ruled_out) if others.larger else ()
        if own is None and not (fallbacks or larger):
            if request.model in groups or (ruled_out and request.model in other):
                raise self._without_deployments(request, ruled_out)
            if request.model in other and not request.is_passthrough:
                raise UnsupportedValue(
                    f"The pass-through model `{request.model}` supports only Chat Completions and Responses.",
                    param="model",
                )
            raise UnknownModel(f"The model `{request.model}` does not exist.", param="model")
        return GroupFailoverRoute(request, own or (*fallbacks, *larger)[0], fallbacks, larger, ruled_out)

    def _ruled_out(self, request: RouteRequest, models: Sequence[str]) -> int:
        """Return the mask of the deployments of `models` that must not answer a request.

        If the request selects a deployment by name, all others are ruled out, regardless of their tags.
        """
        mask, chosen = 0, request.requested.deployment
        for model in models:
            # Tags select among all deployments of a model, Harmony and pass-through.
            groups = [group for of_kind in (self._harmony, self._passthrough) if (group := of_kind.get(model))]
            members = [live for group in groups for live in group.members]
            if chosen or self.rules.tags is None:
                mask |= sum(live.candidate.bit for live in members if live.name != chosen)
                continue
            tagged = [(live.candidate.bit, live.terms.tags) for live in members]
            selected = self.rules.tags.select(tagged, request.requested.tags)
            mask |= sum({bit for bit, _ in tagged} - {*selected})
        return mask

    def _without_deployments(self, request: RouteRequest, ruled_out: int) -> UnisonoError:
        """Return the error for a request whose tags or deployment name rule out all deployments."""
        other = (self._harmony if request.is_passthrough else self._passthrough).get(request.model)
        name = request.requested.model or request.model
        if request.has_both_kinds and other is not None and _is_usable(other, ruled_out):
            return BackendUnavailable("No backend is available for this model and these tags; try again later.")
        if chosen := request.requested.deployment:
            return InvalidRequest(
                f"'{DEPLOYMENT_HEADER}': the model `{name}` has no deployment '{chosen[:64]}' that can answer this "
                "request.",
                param=DEPLOYMENT_HEADER,
            )
        return UnsupportedValue(
            f"No deployment of the model `{name}` has the tags of this request; change 'tags'.", param="tags"
        )

    @property
    def _groups(self) -> Iterator[DeploymentGroup]:
        for of_kind in (self._harmony, self._passthrough):
            yield from of_kind.values()

    def start(self) -> None:
        """Start probing and load polling, and take over the carried deployments.

        Must be called in a running event loop.
        """
        replaced, self._replaced = self._replaced, None
        if replaced is not None:
            renewed = {watched.live.name for watched in self._owned.values()}
            replaced.hand_over([carried.live for carried in self._resources], renewed)
        for carried in self._resources:
            carried.live.become(carried.terms)
        self._own([carried.live for carried in self._resources])
        self._resources.clear()
        self._watching = [
            asyncio.create_task(self._watch(), name="probe backends"),
            asyncio.create_task(self._watch_load(), name="poll the load of backends"),
        ]

    def _own(self, lives: Sequence[LiveDeployment]) -> None:
        for live in lives:
            live.tolerance = self.rules.tolerance
            live.is_weighted_by_quality = self.rules.is_by_quality
            live.apply_weight()
            live.on_doubt = self._doubts.set
            live.waits.on_probe_at = self._probe_by
            self._owned[id(live)] = WatchState(live)
            if id(live) not in self._used:
                self._used[id(live)] = live
                live.users += 1
        for group in self._groups:
            for live in group.members:
                if live in lives:
                    group.listen(live)
        self._by_name = {live.name: (group, live) for group in self._groups for live in group.members}

    def record_answer(self, deployment: str, faults: Collection[AnswerFault], workload: int) -> None:
        """Record an answer of a deployment; no effect if a reload has removed the deployment."""
        if (found := self._by_name.get(deployment)) is not None:
            group, live = found
            group.record_answer(live, faults, workload)

    def hand_over(self, carried: Sequence[LiveDeployment], renewed: Collection[str]) -> None:
        """Stop monitoring the deployments `carried`, which another pool now monitors.

        These stay open for requests of this pool. Deployments that are neither carried nor recreated with the same name
        (`renewed`) were removed. Waiting requests of this pool use them only if no other deployment works.
        """
        for watched in [each for live in carried if (each := self._owned.pop(id(live), None)) is not None]:
            for task in (watched.probe, watched.loading):
                if task is not None:
                    task.cancel()
        for live in [each.live for each in self._owned.values() if each.live.name not in renewed]:
            live.become(replace(live.terms, is_removed=True))

    def _probe_by(self, at: float) -> None:
        """Wake the task `_watch` if a probe is needed at the time `at`, before its next check."""
        if at < self._watches_at:
            self._doubts.set()

    async def _watch(self) -> None:
        while True:
            self._doubts.clear()
            now = self._clock()
            for watched in self._owned.values():
                if watched.probe is None and watched.live.stale(now):
                    # Each probe is a task, so that a probe that hangs does not delay the others.
                    watched.probe = asyncio.create_task(self._probe(watched))
            urgent = any(watched.live.urgent(now) for watched in self._owned.values())
            pause = min(URGENT_EVERY_S, WATCH_EVERY_S) if urgent else WATCH_EVERY_S
            # Jittered, so that many gateways do not probe one server at the same moment.
            pause *= uniform(0.8, 1.2)  # noqa: S311 - nothing secret
            unprobed = (one.live for one in self._owned.values() if one.probe is None)
            due = min((live.waits.next_probe_at for live in unprobed), default=inf)
            pause = min(pause, max(due - now, LOOK_S))
            self._watches_at = now + pause
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._doubts.wait()
            if urgent:
                # Even if the task is woken more often, check only a few times a second.
                await asyncio.sleep(min(pause, LOOK_S))

    async def _probe(self, watched: WatchState) -> None:
        try:
            async with self._probe_slots:
                phase = watched.live.phase(self._clock())
                if phase is CircuitPhase.HALF_OPEN:
                    log.info("backend cooldown over; probing it", extra={"backend": watched.live.name})
                await watched.live.check()
                if phase is not CircuitPhase.CLOSED:
                    # A single successful probe may be luck.
                    await watched.live.check()
        except UnisonoError as error:
            # The deployment stores and logs the error.
            if kind_of(error) is BreakerFailure.UNREACHABLE:
                # The server may be restarting; its prefix cache will be empty.
                watched.live.times.clear()
                self.prefixes.forget(watched.live.candidate.bit, self._clock())
        finally:
            watched.probe = None

    async def _watch_load(self) -> None:
        while True:
            await asyncio.sleep(LOAD_EVERY_S * uniform(0.8, 1.2))  # noqa: S311 - nothing secret
            now = self._clock()
            for group in self._groups:
                recently = max((live.last_request_at for live in group.members), default=0.0)
                busy = len(group.members) > 1 and recently and now - recently < LOAD_WHILE_S
                for watched in (self._owned.get(id(live)) for live in group.members):
                    if watched is None or watched.loading is not None:
                        continue
                    if busy and now >= watched.silent_until and watched.live.known is not None:
                        watched.loading = asyncio.create_task(self._poll_load(watched))
                    elif watched.live.candidate.foreign_requests:
                        # Load was not polled recently, so it is unknown.
                        watched.live.set_server_load(None)

    async def _poll_load(self, watched: WatchState) -> None:
        running_before = watched.live.candidate.running
        try:
            async with asyncio.timeout(LOAD_WITHIN_S):
                load = await watched.live.endpoint.load()
        except (UnisonoError, TimeoutError):
            # Until the load is polled again, it is unknown: the last value is no longer valid.
            watched.live.set_server_load(None)
        else:
            watched.live.set_server_load(load, running_before)
            if load is None:
                watched.silent_until = self._clock() + SILENT_FOR_S
        finally:
            watched.loading = None

    async def wait_for_probes(self, timeout_s: float) -> None:
        """Wait until every deployment has been probed once, but at most `timeout_s` seconds."""
        live = [one for group in self._groups for one in group.members]
        probing = [asyncio.ensure_future(one.capabilities()) for one in live if one.known is None]
        if probing:
            _, unfinished = await asyncio.wait(probing, timeout=timeout_s)
            for waiter in unfinished:
                waiter.cancel()
            await asyncio.gather(*probing, return_exceptions=True)

    def status(self) -> list[DeploymentStatus]:
        now = self._clock()
        return [status_of(group.model, live, len(group.line), now) for group in self._groups for live in group.members]

    def members(self) -> Mapping[str, Sequence[LiveDeployment]]:
        """Return the deployments of each model name."""
        found: dict[str, Sequence[LiveDeployment]] = {}
        for group in self._groups:
            found[group.model] = [*found.get(group.model, ()), *group.members]
        return found

    def terms_of(self, live: LiveDeployment) -> DeploymentConfig:
        """Return the configuration that a deployment of this pool has after `start`.

        Before `start`, a deployment that is carried over keeps its name and configuration of the earlier pool.
        """
        return next((carried.terms for carried in self._resources if carried.live is live), live.terms)

    def names(self) -> list[tuple[str, str]]:
        """Return the model name of each deployment, and the deployment's name after `start`."""
        return [(model, self.terms_of(live).name) for model, members in self.members().items() for live in members]

    def context(self, model: str) -> int | None:
        """Return the smallest known context window of the deployments of `model`, in tokens.

        None if no window is known.
        """
        return min((size for live in self.members().get(model, ()) if (size := _window(live))), default=None)

    async def aclose(self) -> None:
        """Stop monitoring, and close the deployments that no other pool uses."""
        owned = list(self._owned.values())
        asking = [task for one in owned for task in (one.probe, one.loading)]
        await cancel_and_wait(*self._watching, *asking)
        for group in self._groups:
            group.close()
        used = list(self._used.values())
        self._owned.clear()
        self._used.clear()
        for live in used:
            live.users -= 1
        unused = [live for live in used if not live.users]
        for live in unused:
            self.prefixes.leave(live.candidate.bit, self._clock())
        await asyncio.gather(*(live.aclose() for live in unused))


def _usable(groups: Mapping[str, DeploymentGroup], models: Sequence[str], ruled_out: int) -> Sequence[DeploymentGroup]:
    """Return the groups of `models` that have a deployment outside the mask `ruled_out`."""
    found = [group for name in models if (group := groups.get(name))]
    return [group for group in found if _is_usable(group, ruled_out)] if ruled_out else found


def _is_usable(group: DeploymentGroup, ruled_out: int) -> bool:
    return any(not live.candidate.bit & ruled_out for live in group.members)


def _window(deployment: LiveDeployment) -> int | None:
    return deployment.known.context if deployment.known is not None else deployment.context
