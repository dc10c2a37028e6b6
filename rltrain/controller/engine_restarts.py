"""A rollout engine that died or hangs is started again alone, and the run goes on.

It loads while the others work, and joins them when none generates: at the next weight sync or, if a
step has nothing else to wait for, in its midst. It then has the weights that the others have, the
seed of its number and its place, so a deterministic run ends as it would have.

All parts start again (`supervision`) where this cannot be: the engine shares its GPUs with the
policy, whose memory would have to be put aside first; the policy has been updated since the last
weight sync, and nothing but the new engine is left to generate; the engine fails within a weight
sync, which leaves the others half-loaded; or engines died too often.
"""

import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import ray

from rltrain.actors.failures import ActorFailed, AwaitedCall, check_nodes, sparing, timeout_failure
from rltrain.actors.run_nodes import lost_node
from rltrain.controller.cluster.engines import Engines, get_all_of_engines
from rltrain.controller.supervision import Restarts
from rltrain.controller.weight_sync import WeightSync
from rltrain.rollout.engine import RolloutEngine

logger = logging.getLogger(__name__)

POLL_S = 0.2
START = AwaitedCall("rollout", "start", "cluster.start_timeout_s")


class _Started(NamedTuple):
    """An engine that has no weights yet."""

    ready: Any
    """A reference to its capabilities."""
    at: float
    failure: ActorFailed
    """Why it was started again."""


@dataclass
class EngineRestarts:
    """It is a `rltrain.rollout.dispatch.Replacer`.

    Args:
        start: ends what is left of an engine, by its number and actor, and begins to load it
            anew; see `rltrain.rollout.engine.start_engine`
        budget: of restarts; those of the whole run count, too
        colocated: whether engines share GPUs with the policy
    """

    engines: Engines
    weight_sync: WeightSync
    start: Callable[[int, Any], tuple[Any, Any]]
    budget: Restarts
    colocated: bool
    waits_for_sync: bool = False
    """Whether requests may wait for the next weight sync, where the policy was updated since the
    last one."""
    count: int = 0
    """Engines that were started again."""
    _started: dict[int, _Started] = field(default_factory=dict)

    @property
    def _replaces(self) -> bool:
        return self.budget.limit > 0 and not self.colocated

    @contextmanager
    def sparing_others(self) -> Iterator[None]:
        """Within, the death of an engine ends no wait for other actors."""
        with sparing(*([RolloutEngine.__name__] if self._replaces else [])):
            yield

    @property
    def away(self) -> Collection[int]:
        """Engines that were started again and have not joined."""
        return self._started.keys()

    def lost(self, engine: int, failure: ActorFailed) -> None:
        """Begin to start an engine again.

        Raises:
            ActorFailed: ``failure``, where it cannot or may not be.
        """
        if self.colocated:
            logger.error(
                "Engine %d shares its GPUs with the policy, so it is not started again alone.",
                engine,
            )
            raise failure
        if lost_node() or not self.budget.take(time.monotonic()):
            raise failure
        self.count += 1
        logger.error(
            "%s\n  Engine %d alone is started again, and its requests are queued again (restart "
            "%d; at most trainer.max_restarts=%d in %g s).",
            failure,
            engine,
            self.budget.taken,
            self.budget.limit,
            self.budget.window_s,
        )
        actor, ready = self.start(engine, self.engines.actors[engine])
        self.engines.actors[engine] = actor
        self._started[engine] = _Started(ready, time.monotonic(), failure)

    def try_join(self) -> bool:
        """Have the engines that are away join with the weights of the others, if they are loaded.
        No engine may be generating, and one is away.

        Returns:
            Whether they have.

        Raises:
            ActorFailed: as `lost`, or the weights are gone.
        """
        if not self.weight_sync.can_repeat and self.waits_for_sync:
            return False
        if not self.weight_sync.can_repeat:
            engine, started = next(iter(self._started.items()))
            logger.error(
                "The policy was updated since the last weight sync (trainer.sync_every), so engine "
                "%d cannot have the weights that this step is to generate with.",
                engine,
            )
            raise started.failure
        if not self._all_ready():
            return False
        self._join()
        self.weight_sync.repeat()
        return True

    def complete(self) -> None:
        """Before a weight sync, and with no engine generating: all engines live and are loaded.

        Raises:
            ActorFailed: as `lost`, or an engine does not answer in time.
        """
        if not self._replaces:
            return
        # Those that are dead load while those that were lost before are waited for.
        self._find_dead([e for e in range(len(self.engines.actors)) if e not in self._started])
        while not self._all_ready():
            check_nodes(START)
            time.sleep(POLL_S)
        self._join()

    def _join(self) -> None:
        """At the weight sync that follows."""
        for engine, started in self._started.items():
            logger.info(
                "engine %d joins again, %.0f s after its death was noticed",
                engine,
                time.monotonic() - started.at,
            )
        if self._started:
            self.weight_sync.disconnect()
            self._started.clear()

    def _all_ready(self) -> bool:
        """Whether all are loaded and alive."""
        everyone = range(len(self.engines.actors))
        return self._all_loaded() and not self._find_dead(everyone)

    def _find_dead(self, among: Sequence[int]) -> bool:
        """Whether some of them died while nobody waited for them; these are started again."""
        lost = False
        refs = {engine: self.engines.actors[engine].devices.remote() for engine in among}
        for engine, ref in refs.items():
            try:
                get_all_of_engines([ref], "devices", self.engines.timeout_s)
            except ActorFailed as failure:
                if failure.kind == "raised":
                    raise
                self.lost(engine, failure)
                lost = True
        return lost

    def _all_loaded(self) -> bool:
        """One that fails meanwhile is started once more."""
        loading = False
        for engine, started in list(self._started.items()):
            limit_s = self.engines.start_timeout_s
            try:
                if ray.wait([started.ready], timeout=0)[0]:
                    get_all_of_engines([started.ready], START.method, limit_s)
                    continue
                if time.monotonic() - started.at > limit_s:
                    raise timeout_failure(START, 1, 1, limit_s)
            except ActorFailed as failure:
                self.lost(engine, failure)
            loading = True
        return not loading
