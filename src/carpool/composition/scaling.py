"""Scaling: what the rules of core/scaling.py go by, where their decisions are kept, and what operators see of them."""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Protocol

import msgspec
from msgspec import UNSET

from carpool.admission.shedding import LoadShedder
from carpool.composition.runtime import Runtime
from carpool.composition.shedding import queue_timeout_s
from carpool.core.scaling import Decision, Decisions, Demand, Loads, ModelLoad, ServerLoad, scale_all
from carpool.core.snapshot import ModelScale, Scale, ScaleNumbers, Wanted
from carpool.service import ModelService
from carpool.settings import Settings

logger = logging.getLogger("carpool")

DECIDE_S, MEASURE_S = 2.0, 1.0
# Weight of the last second in rates: they are means over some 5 s.
RATE_WEIGHT = 0.2
# Tasks that wait should be served in this share of the time that they have.
DRAIN_SHARE = 0.5
FILE_NAME = "scale.json"
FILE_BYTES_MAX = 1024 * 1024
# What changed less than a new number is written so often.
WRITE_S = 60.0


class Demands:
    """What comes to this process, by model."""

    def __init__(
        self,
        runtime: Runtime,
        shedders: Mapping[str, LoadShedder],
        # By model: synchronous requests that found no endpoint so far, those that were admitted, and tasks.
        turned_away: Mapping[str, int],
        sync_arrivals: Callable[[str], int],
        task_arrivals: Callable[[str], int],
    ) -> None:
        self._shedders = shedders
        self._turned_away, self._sync, self._tasks = turned_away, sync_arrivals, task_arrivals
        self._tiers = len(runtime.settings.tiers)
        self._counts = {model: self._count(model) for model in runtime.models}
        self._rates = {model: [0.0] * len(counts) for model, counts in self._counts.items()}
        self._clock = runtime.clock
        self._measured_at = runtime.clock()
        runtime.do_every(MEASURE_S, self._measure)

    def of(self, model: str) -> Demand:
        """The rates of the last seconds, and the wait of now."""
        others, tasks, *refused = self._rates[model]
        shedder = self._shedders.get(model)
        # An infinite one has no place in JSON.
        wait_s = 0.0 if shedder is None else min(shedder.wait_now_s(self._tiers - 1), 1e6)
        return Demand(others + sum(refused), tasks, tuple(refused), wait_s)

    def _count(self, model: str) -> list[int]:
        shedder = self._shedders.get(model)
        others = self._sync(model) + self._turned_away[model]
        return [others, self._tasks(model), *([] if shedder is None else shedder.shed)]

    def _measure(self) -> None:
        now = self._clock()
        # Timers come late when there is much to do.
        seconds, self._measured_at = max(now - self._measured_at, MEASURE_S / 2), now
        for model, before in self._counts.items():
            counts = self._counts[model] = self._count(model)
            self._rates[model] = [
                rate + RATE_WEIGHT * ((count - then) / seconds - rate)
                for rate, count, then in zip(self._rates[model], counts, before, strict=True)
            ]


class Cores:
    """How many processor cores this process uses."""

    def __init__(self, runtime: Runtime) -> None:
        self._then = time.process_time()
        self._measured_at = time.monotonic()
        self.used = 0.0
        runtime.do_every(MEASURE_S, self._measure)

    def _measure(self) -> None:
        spent, now = time.process_time(), time.monotonic()
        seconds = max(now - self._measured_at, MEASURE_S / 2)
        self.used += RATE_WEIGHT * ((spent - self._then) / seconds - self.used)
        self._then, self._measured_at = spent, now


class Keeper(Protocol):
    """Where decisions are kept, with what must be remembered for the next ones."""

    decisions: Decisions

    def now(self) -> float:
        """On the clock of the times in them."""

    def propose(self, decisions: Decisions | None) -> None:
        """Let these be the decisions; None: see what other processes decided."""


class KeptInFile:
    """In a file, for a process that is alone; without a path in memory only."""

    def __init__(self, runtime: Runtime, path: Path | None) -> None:
        self._runtime = runtime
        self._path = path
        self._written_at = 0.0
        self.decisions = Decisions() if path is None else read_decisions(path)

    def now(self) -> float:
        """The time of day: it goes on while no process runs."""
        return time.time()

    def propose(self, decisions: Decisions | None) -> None:
        """Keep them; the file has every new number at once, and the rest within a minute."""
        if decisions is None:
            return
        before, self.decisions = self.decisions, decisions
        is_new = _numbers(before) != _numbers(decisions)
        if self._path is not None and (is_new or self._runtime.clock() - self._written_at >= WRITE_S):
            self._written_at = self._runtime.clock()
            self._runtime.in_background(asyncio.to_thread(write_decisions, self._path, decisions))


def _numbers(decisions: Decisions) -> dict[str, int]:
    return {model: each.wanted for model, each in decisions.models.items()}


def read_decisions(path: Path) -> Decisions:
    """Those in a file; none where there is no such file, or it is another one."""
    try:
        with path.open("rb") as file:
            return msgspec.json.decode(file.read(FILE_BYTES_MAX), type=Decisions)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return Decisions()


def write_decisions(path: Path, decisions: Decisions) -> None:
    """Replace the file. Who loses it scales down a little later: it is not waited for the disk."""
    try:
        temporary = path.with_suffix(".new")
        temporary.write_bytes(msgspec.json.encode(decisions))
        os.replace(temporary, path)
    except OSError as failure:
        logger.warning("what is wanted cannot be kept in %s: %s", path, failure.strerror)


class Scaling:
    """Decides again and again how many are wanted, and shows it."""

    def __init__(self, runtime: Runtime, loads: Callable[[Decisions], Loads], keeper: Keeper) -> None:
        self._runtime = runtime
        # What there is to go by, which may depend on what was decided before.
        self._find_loads = loads
        self._keeper = keeper
        self._loads = Loads(models={})

    def start(self, *, decides: bool = True) -> None:
        """Decide from now on; or see what others decide."""
        self._runtime.do_every(DECIDE_S, self._decide if decides else self._look)

    def _decide(self) -> None:
        before = self._keeper.decisions
        self._loads = self._find_loads(before)
        self._keeper.propose(scale_all(self._loads, before, self._keeper.now()))

    def _look(self) -> None:
        self._loads = self._find_loads(self._keeper.decisions)
        self._keeper.propose(None)

    def state(self) -> Scale:
        """What `/internal/scale` shows."""
        decisions, loads = self._keeper.decisions, self._loads
        return Scale(
            models={model: _model_scale(each, loads.models.get(model)) for model, each in decisions.models.items()},
            gateways=_wanted(decisions.gateways, loads.gateways),
            batchers=_wanted(decisions.batchers, loads.batchers),
        )

    def numbers(self) -> ScaleNumbers:
        """What `/metrics` shows."""
        state = self.state()
        servers = {"gateways": state.gateways, "batchers": state.batchers}
        return ScaleNumbers(
            wanted={("gpus", model): each.wanted for model, each in state.models.items()}
            | {(what, ""): each.wanted for what, each in servers.items() if isinstance(each, Wanted)},
            backlog_seconds={model: each.backlog_seconds for model, each in state.models.items()},
        )


def _model_scale(decision: Decision, load: ModelLoad | None) -> ModelScale:
    there, backlog_s = (None, 0.0) if load is None else (load.works, load.backlog_s)
    return ModelScale(wanted=decision.wanted, there=there, why=decision.why, backlog_seconds=round(backlog_s, 3))


def _wanted(decision: Decision | None, load: ServerLoad | None) -> Wanted | msgspec.UnsetType:
    if decision is None:
        return UNSET
    return Wanted(wanted=decision.wanted, there=None if load is None else load.live, why=decision.why)


def drain_s(settings: Settings) -> float:
    """Within which time tasks that wait should be served."""
    return DRAIN_SHARE * settings.tasks.timeout_s


def own_load(service: ModelService, demand: Demand, waiting: int, settings: Settings) -> ModelLoad:
    """The load of a model whose endpoints are this process's own."""
    works = service.fleet.working()
    is_known = works > 0 and service.loop.is_capacity_known()
    return ModelLoad(
        works=works,
        failing=service.fleet.failing(),
        gpu_rps=service.capacity_rps() / works if is_known else 0.0,
        sync_rps=demand.sync_rps,
        task_rps=demand.task_rps,
        refused_rps=dict(zip((tier.name for tier in settings.tiers), demand.refused_rps, strict=False)),
        busy_share=service.utilization,
        fill=service.fill,
        waiting=waiting,
        drain_s=drain_s(settings),
        wait_s=demand.wait_s,
        wait_max_s=queue_timeout_s(settings),
    )


def own_loads(
    services: Iterable[ModelService], demands: Demands, waiting: Callable[[str], int], settings: Settings
) -> Loads:
    """The load of a process that is alone."""
    return Loads(
        models={
            service.name: own_load(service, demands.of(service.name), waiting(service.name), settings)
            for service in services
        }
    )
