"""Runs a reward function in worker processes that can be killed.

If a sample takes too long, its worker is killed with all processes that it started, and replaced.
The sample then has no reward. Samples without a reward are counted; they never get a reward of 0.
"""

import logging
import time
from collections import Counter, deque
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Self

from rltrain.config.error_codes import with_code
from rltrain.config.reward import RewardConfig
from rltrain.environments.pool_worker import PoolWorker
from rltrain.environments.reward_sample import RewardInput, RewardResult, encode_group
from rltrain.environments.worker_process import wait

logger = logging.getLogger(__name__)

LONGEST_WAIT_S = 1.0
MOST_FAILED_STARTS = 3
"""Per worker of the pool, and in a row."""
CHUNK = 32
"""Maximum samples per message to a worker, unless one group has more. It keeps the share of round
trips small for cheap rewards."""


class RewardPool:
    """``config.num_workers`` processes, which start together and live as long as the run.

        for samples in arriving:
            submitted += pool.submit_group(samples)
            pool.poll()                # as often as possible, so that no worker is idle
        results = pool.collect(submitted)

    A worker lives until the thread that made it ends, at the latest until its process does.

    Args:
        logs: the folder for ``reward-N.log``, the output of the workers
    Raises:
        ValueError: the reward function cannot be used; the message says why.
    """

    def __init__(self, config: RewardConfig, logs: Path) -> None:
        self.config = config
        self._logs = logs
        self.success_at = config.success_at
        self._count = 0  # samples submitted so far; their positions count them
        self._samples: dict[int, RewardInput] = {}  # by position, of those not collected
        self._lines: dict[int, str] = {}  # likewise, by the first position of each group
        self._queue: deque[tuple[int, ...]] = deque()  # groups that no worker has
        self._results: dict[int, RewardResult] = {}
        # by position: workers that ended and may not have been ended by it
        self._deaths: Counter[int] = Counter()
        self._failed_starts = 0  # in a row: workers that ended before they began a sample
        self._workers: list[PoolWorker] = []
        try:
            for slot in range(config.num_workers):  # start them all, then wait
                self._workers.append(self._start(slot))
            while not all(worker.is_ready for worker in self._workers):
                wait([worker.process for worker in self._workers], LONGEST_WAIT_S)
                for worker in self._workers:
                    worker.listen()
                    if why := worker.start_failure():
                        raise ValueError(with_code(why, "RL2009"))
        except BaseException:
            self.close()
            raise
        if self.success_at is None:
            self.success_at = self._workers[0].success_at
        self._takes_groups = self._workers[0].takes_groups

    def score(self, samples: Sequence[RewardInput]) -> list[RewardResult]:
        """The result of each sample, in order; raises as `submit` and `collect`."""
        return self.collect(self.submit(samples))

    def submit(self, samples: Sequence[RewardInput]) -> Sequence[int]:
        """Queue samples, each of a group of its own, and start to score them.

        Returns:
            Their positions, by which `collect` knows them.

        Raises:
            ValueError: an answer or a column is not plain JSON; the message names it.
        """
        return self._submit([[sample] for sample in samples])

    def submit_group(self, samples: Sequence[RewardInput]) -> Sequence[int]:
        """As `submit`, of samples of one prompt. One call judges them all, where a function of the
        reward takes groups."""
        if samples and self._takes_groups:
            return self._submit([samples])
        return self.submit(samples)

    def _submit(self, groups: Sequence[Sequence[RewardInput]]) -> Sequence[int]:
        samples = [sample for group in groups for sample in group]
        positions = range(self._count, self._count + len(samples))
        rest = iter(positions)
        numbered = [tuple(islice(rest, len(group))) for group in groups]
        self._lines |= {
            numbers[0]: encode_group(numbers, group, self.config.text)
            for numbers, group in zip(numbered, groups, strict=True)
        }
        self._samples |= dict(zip(positions, samples, strict=True))
        self._queue.extend(numbered)
        self._count += len(samples)
        self.poll()
        return positions

    def has(self, positions: Sequence[int]) -> bool:
        """Whether all of these samples have their results."""
        return all(position in self._results for position in positions)

    def collect(self, positions: Sequence[int]) -> list[RewardResult]:
        """Wait for the results of these samples, each of which is collected once; in this order.

        Raises:
            RuntimeError: more than ``max_failed_fraction`` of them have no reward; the message
                names the function, the first such sample and what happened.
        """
        while not self.has(positions):
            self.wait(LONGEST_WAIT_S)
            self.poll()
        for position in positions:
            self._lines.pop(position, None)
            self._deaths.pop(position, None)
        samples = [self._samples.pop(position) for position in positions]
        results = [self._results.pop(position) for position in positions]
        self._check_failures(samples, results)
        return results

    def poll(self) -> None:
        """Receive results, replace failed workers, and give samples to idle workers.

        Raises:
            RuntimeError: workers fail repeatedly before they begin a sample.
        """
        now = time.monotonic()
        for slot, worker in enumerate(self._workers):
            results = worker.listen(self.success_at)
            self._results |= results
            if results or worker.has_begun:
                self._failed_starts = 0
            if failure := worker.failure(self.config.timeout_s, now):
                self._replace(slot, worker, failure)
        for worker in self._workers:
            if worker.is_ready and not worker.assigned and self._queue:
                most = CHUNK // len(self._queue[0])
                chunk = max(1, min(most, len(self._queue) // len(self._workers)))
                groups = [self._queue.popleft() for _ in range(chunk)]
                worker.assign(groups, [self._lines[group[0]] for group in groups])

    def close(self) -> None:
        for worker in self._workers:
            worker.process.kill()
        self._workers = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _start(self, slot: int) -> PoolWorker:
        return PoolWorker(self.config, self._logs / f"reward-{slot}.log")

    def wait(self, limit_s: float) -> None:
        """Sleep until a worker sends a message or reaches its limit, at most ``limit_s``."""
        deadlines = [worker.deadline(self.config.timeout_s) for worker in self._workers]
        seconds = min([d - time.monotonic() for d in deadlines] + [limit_s])
        wait([worker.process for worker in self._workers], max(0.0, seconds))

    def _replace(self, slot: int, worker: PoolWorker, failure: RewardResult) -> None:
        if not worker.has_begun and (worker.assigned or not worker.is_ready):
            self._failed_starts += 1
            if self._failed_starts == MOST_FAILED_STARTS * self.config.num_workers:
                raise RuntimeError(
                    f"{self._failed_starts} times in a row: {failure.detail} [RL2010]"
                )
        waiting = list(worker.assigned)
        is_blamed = False
        if waiting:
            # A worker that died before it began its first sample, or that wrote a message that was
            # not due, does not count against the sample, unless that happens twice: a sample
            # before it may have left a thread.
            self._deaths[waiting[0][0]] += 1
            is_its_fault = worker.has_begun and not worker.process.wrote_wrongly
            if is_its_fault or self._deaths[waiting[0][0]] == 2:
                self._results |= dict.fromkeys(waiting.pop(0), failure)
                is_blamed = True
        if not is_blamed:  # else the sample's result says it
            logger.warning("reward worker %d: %s; another takes its place", slot, failure.detail)
        self._queue.extendleft(reversed(waiting))
        worker.process.kill()
        self._workers[slot] = self._start(slot)

    def _check_failures(
        self, samples: Sequence[RewardInput], results: Sequence[RewardResult]
    ) -> None:
        failed = [i for i, result in enumerate(results) if result.status != "ok"]
        if not failed:
            return
        first, result = samples[failed[0]], results[failed[0]]
        what = f"reward function {self.config.function}"
        if self.config.components:
            what = self.config.shown
        message = (
            f"{what}: {len(failed)} of {len(samples)} samples have "
            f"no reward; the first is of prompt {first.prompt_id[:12]}, response "
            f"{first.raw[:80]!r}, {result.status}: {result.detail}"
        )
        if len(failed) > self.config.max_failed_fraction * len(samples):
            too_many = (
                f"{message}. More than data.reward.max_failed_fraction="
                f"{self.config.max_failed_fraction} of a step: mend the function or raise that"
            )
            raise RuntimeError(with_code(too_many, "RL2010"))
        logger.warning(message)
