"""Runs a reward function in processes that can be killed.

A sample that takes too long costs its worker's life, not the run's: the worker is killed with
everything it started, replaced, and the sample has no reward. A sample without a reward is counted
and never passes for a zero.
"""

import logging
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import wait
from types import TracebackType
from typing import Any, Literal

from rltrain.config.data import RewardConfig

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0
LONGEST_WAIT_S = 1.0
CHUNK = 32
"""Samples a worker gets at once, so that a cheap reward is not all round trips."""


@dataclass(frozen=True)
class Sample:
    """What a reward function judges; ``prompt_id`` is only for messages."""

    response: str
    answer: Any
    prompt: str
    columns: dict[str, Any]
    prompt_id: str


@dataclass(frozen=True)
class RewardResult:
    """``value`` is None unless ``status`` is ok; ``detail`` says why it is not."""

    value: float | None
    status: Literal["ok", "timeout", "error"]
    detail: str
    seconds: float


class RewardPool:
    """``config.num_workers`` processes, started at once and kept for the run.

        for samples in arriving:
            pool.submit(samples)
            pool.poll()                # whenever there is time, so that no worker waits for more
        results = pool.collect()

    Raises:
        ValueError: when the reward function cannot be used; the message says why.
    """

    def __init__(self, config: RewardConfig) -> None:
        self.config = config
        self._samples: list[Sample] = []  # since the last ``collect``
        self._queue: deque[int] = deque()  # positions there of those no worker has
        self._results: dict[int, RewardResult] = {}
        self._workers: list[_Worker] = []
        try:
            for _ in range(config.num_workers):  # start them all, then wait
                self._workers.append(_Worker(config.function))
            for worker in self._workers:
                worker.wait_until_ready()
        except BaseException:
            self.close()
            raise

    def score(self, samples: Sequence[Sample]) -> list[RewardResult]:
        """The result of each sample, in order; raises as `collect`."""
        self.submit(samples)
        return self.collect()

    def submit(self, samples: Sequence[Sample]) -> None:
        """Begin with more samples."""
        self._queue.extend(range(len(self._samples), len(self._samples) + len(samples)))
        self._samples += samples
        self.poll()

    def collect(self) -> list[RewardResult]:
        """The results of all that was submitted since the last time, in that order.

        Raises:
            RuntimeError: when more than ``max_failed_fraction`` of them have no reward; the message
                names the function, the first such sample and what happened.
        """
        while len(self._results) < len(self._samples):
            self._wait()
            self.poll()
        samples, results = self._samples, [self._results[i] for i in range(len(self._samples))]
        self._samples, self._results = [], {}
        self._check_failures(samples, results)
        return results

    def poll(self) -> None:
        """Take results that have arrived, replace workers that failed, give idle ones work."""
        for slot, worker in enumerate(self._workers):
            self._results |= worker.collect()
            failure = worker.failure(self.config.timeout_s)
            if failure is None:
                continue
            if worker.began:  # else it died before the first sample, which is not to blame
                self._results[worker.assigned.pop(0)] = failure
            self._queue.extendleft(reversed(worker.assigned))
            worker.kill()
            self._workers[slot] = _Worker(self.config.function)
            self._workers[slot].wait_until_ready()
        for worker in self._workers:
            if not worker.assigned and self._queue:
                chunk = max(1, min(CHUNK, len(self._queue) // len(self._workers)))
                indices = [self._queue.popleft() for _ in range(chunk)]
                worker.assign(indices, [self._samples[i] for i in indices])

    def close(self) -> None:
        for worker in self._workers:
            worker.kill()
        self._workers = []

    def __enter__(self) -> "RewardPool":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _wait(self) -> None:
        """Sleep until a worker has something to say or runs out of time."""
        busy = [w for w in self._workers if w.assigned]
        deadlines = [w.began + self.config.timeout_s for w in busy if w.began]
        seconds = min([d - time.monotonic() for d in deadlines] + [LONGEST_WAIT_S])
        wait([w.connection for w in busy], max(0.0, seconds))

    def _check_failures(self, samples: Sequence[Sample], results: list[RewardResult]) -> None:
        failed = [i for i, result in enumerate(results) if result.status != "ok"]
        if not failed:
            return
        first, result = samples[failed[0]], results[failed[0]]
        message = (
            f"reward function {self.config.function}: {len(failed)} of {len(samples)} samples have "
            f"no reward; the first is of prompt {first.prompt_id[:12]}, response "
            f"{first.response[:80]!r}, {result.status}: {result.detail}"
        )
        if len(failed) > self.config.max_failed_fraction * len(samples):
            raise RuntimeError(
                f"{message}. More than data.reward.max_failed_fraction="
                f"{self.config.max_failed_fraction} of a step: mend the function or raise that"
            )
        logger.warning(message)


class _Worker:
    """One process, the samples it has not answered yet, and when it began the first of them."""

    def __init__(self, function: str) -> None:
        self.function = function
        self.assigned: list[int] = []
        self.began = 0.0
        self.dead = False
        self.connection, theirs = Pipe()
        # A fresh interpreter: a fork would copy Ray's and torch's threads in whatever state they
        # are in, and multiprocessing's spawn would import the parent's main module.
        command = [sys.executable, "-m", "rltrain.environments.reward_worker"]
        self.process = subprocess.Popen(
            [*command, str(theirs.fileno()), str(os.getpid()), function],
            pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)},
            start_new_session=True,  # so that what the reward starts is killed with it
        )
        theirs.close()

    def wait_until_ready(self) -> None:
        """Raises ValueError with the worker's own words when the function cannot be used."""
        why = f"its process said nothing for {START_TIMEOUT_S:.0f} s"
        if self.connection.poll(START_TIMEOUT_S):
            try:
                status, why = self.connection.recv()
            except EOFError:
                status, why = "dead", f"its process ended with exit code {self.process.wait()}"
            if status == "ready":
                return
            if status == "unusable":
                raise ValueError(why)
        raise ValueError(f"data.reward.function={self.function} cannot be started: {why}")

    def assign(self, indices: list[int], samples: list[Sample]) -> None:
        self.assigned, self.began = indices, 0.0
        try:
            self.connection.send(
                [(s.response, s.answer, {**s.columns, "prompt": s.prompt}) for s in samples]
            )
        except OSError:  # it died between steps: it is replaced and nothing is lost
            self.dead = True

    def collect(self) -> dict[int, RewardResult]:
        """Results that have arrived, by index."""
        results: dict[int, RewardResult] = {}
        ended = self.process.poll() is not None  # asked first: what it said before is then read
        try:
            while self.assigned and self.connection.poll():
                message = self.connection.recv()
                if message[0] == "began":
                    self.began = message[1]
                    continue
                status, value, detail, clock = message
                seconds, self.began = clock - self.began, clock
                results[self.assigned.pop(0)] = RewardResult(value, status, detail, seconds)
        except (EOFError, OSError):
            ended = True
        self.dead = self.dead or ended
        return results

    def failure(self, timeout_s: float) -> RewardResult | None:
        """What ended the sample in work, if something did; the caller replaces the worker."""
        if not self.assigned:
            return None
        seconds = time.monotonic() - self.began if self.began else 0.0
        if self.dead:
            detail = f"its process ended with exit code {self.process.wait()}"
            return RewardResult(None, "error", detail, seconds)
        # A message that waits to be read may be this sample's: only silence is a timeout.
        if seconds > timeout_s and not self.connection.poll():
            detail = f"not done in data.reward.timeout_s={timeout_s} s"
            return RewardResult(None, "timeout", detail, seconds)
        return None

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.connection.close()
