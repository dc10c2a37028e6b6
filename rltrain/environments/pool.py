"""Runs a reward function in worker processes that can be killed.

If a sample takes too long, its worker is killed with all processes that it started, and replaced.
The sample then has no reward. Samples without a reward are counted; they never get a reward of 0.
"""

import json
import logging
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from rltrain.config.data import RewardConfig
from rltrain.config.error_codes import with_code
from rltrain.environments.rewards import judgement
from rltrain.environments.worker_process import WorkerProcess, wait

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0
BEGIN_TIMEOUT_S = 60.0
"""Limit between giving samples to a worker and its message that it begins."""
LONGEST_WAIT_S = 1.0
MOST_FAILED_STARTS = 3
CHUNK = 32
"""Maximum samples per message to a worker. It keeps the share of round trips small for cheap
rewards."""


@dataclass(frozen=True)
class RewardInput:
    """The input of a reward function.

    ``raw`` and ``clean`` are the response with and without its special tokens. ``prompt_id`` is
    used only in messages."""

    raw: str
    clean: str
    answer: Any
    prompt: str
    columns: dict[str, Any]
    prompt_id: str


@dataclass(frozen=True)
class RewardResult:
    """The result of a reward function for one response.

    ``value`` is None unless ``status`` is ok. ``detail`` says why the status is not ok. ``correct``
    is None if there is no value, or if neither configuration nor function says which rewards are
    correct. ``parts`` are those numbers by name that the function returned beside the reward."""

    value: float | None
    status: Literal["ok", "timeout", "error"]
    detail: str
    seconds: float
    correct: bool | None = None
    parts: Mapping[str, float] = field(default_factory=dict)


class RewardPool:
    """``config.num_workers`` processes, which start together and live as long as the run.

        for samples in arriving:
            pool.submit(samples)
            pool.poll()                # as often as possible, so that no worker is idle
        results = pool.collect()

    Raises:
        ValueError: the reward function cannot be used; the message says why.
    """

    def __init__(self, config: RewardConfig) -> None:
        self.config = config
        self.success_at = config.success_at
        self._samples: list[RewardInput] = []  # since the last ``collect``
        self._lines: dict[int, str] = {}  # by position in _samples, of those without a result
        self._queue: deque[int] = deque()  # positions of samples that no worker has
        self._results: dict[int, RewardResult] = {}
        self._deaths: Counter[int] = (
            Counter()
        )  # by position: workers that died before they began it
        self._failed_starts = 0  # in a row
        self._workers: list[_Worker] = []
        try:
            for _ in range(config.num_workers):  # start them all, then wait
                self._workers.append(_Worker(config.function))
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

    def score(self, samples: Sequence[RewardInput]) -> list[RewardResult]:
        """The result of each sample, in order; raises as `submit` and `collect`."""
        self.submit(samples)
        return self.collect()

    def submit(self, samples: Sequence[RewardInput]) -> None:
        """Queue samples and start to score them.

        Raises:
            ValueError: an answer or a column is not plain JSON; the message names it.
        """
        for position, sample in enumerate(samples, len(self._samples)):
            self._lines[position] = _encoded(position, sample, self.config.text)
            self._queue.append(position)
        self._samples += samples
        self.poll()

    def collect(self) -> list[RewardResult]:
        """Wait for the results of all samples submitted since the last ``collect``, in that order.

        Raises:
            RuntimeError: more than ``max_failed_fraction`` of them have no reward; the message
                names the function, the first such sample and what happened.
        """
        while len(self._results) < len(self._samples):
            self._wait()
            self.poll()
        samples, results = self._samples, [self._results[i] for i in range(len(self._samples))]
        self._samples, self._results, self._lines = [], {}, {}
        self._deaths.clear()
        self._check_failures(samples, results)
        return results

    def poll(self) -> None:
        """Receive results, replace failed workers, and give samples to idle workers.

        Raises:
            RuntimeError: workers fail to start repeatedly.
        """
        for slot, worker in enumerate(self._workers):
            self._results |= worker.listen(self.success_at)
            failure = worker.failure(self.config.timeout_s)
            if failure is None:
                if worker.is_ready:
                    self._failed_starts = 0
            else:
                self._replace(slot, worker, failure)
        for worker in self._workers:
            if worker.is_ready and not worker.assigned and self._queue:
                chunk = max(1, min(CHUNK, len(self._queue) // len(self._workers)))
                positions = [self._queue.popleft() for _ in range(chunk)]
                worker.assign(positions, [self._lines[i] for i in positions])

    def close(self) -> None:
        for worker in self._workers:
            worker.process.kill()
        self._workers = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _wait(self) -> None:
        """Sleep until a worker sends a message or reaches its time limit."""
        deadlines = [w.began + self.config.timeout_s for w in self._workers if w.began]
        seconds = min([d - time.monotonic() for d in deadlines] + [LONGEST_WAIT_S])
        wait([worker.process for worker in self._workers], max(0.0, seconds))

    def _replace(self, slot: int, worker: "_Worker", failure: RewardResult) -> None:
        if not worker.is_ready:
            self._failed_starts += 1
            if self._failed_starts == MOST_FAILED_STARTS:
                raise RuntimeError(
                    f"{self._failed_starts} times in a row: {failure.detail} [RL2010]"
                )
        elif worker.assigned:
            first = worker.assigned[0]
            # A worker that died before it began its first sample does not count against the
            # sample, unless that happens twice.
            self._deaths[first] += 1
            if worker.began or self._deaths[first] == 2:
                self._results[worker.assigned.pop(0)] = failure
        self._queue.extendleft(reversed(worker.assigned))
        worker.process.kill()
        self._workers[slot] = _Worker(self.config.function)

    def _check_failures(self, samples: Sequence[RewardInput], results: list[RewardResult]) -> None:
        failed = [i for i, result in enumerate(results) if result.status != "ok"]
        if not failed:
            return
        first, result = samples[failed[0]], results[failed[0]]
        message = (
            f"reward function {self.config.function}: {len(failed)} of {len(samples)} samples have "
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


def dry_run(config: RewardConfig, samples: Sequence[RewardInput]) -> list[RewardResult]:
    """The result of each sample, however many fail. It serves to try a reward before a run.

    Raises:
        ValueError: the reward function cannot be used, or a sample is not plain JSON.
    """
    with RewardPool(config.model_copy(update={"num_workers": 1, "max_failed_fraction": 1})) as pool:
        return pool.score(samples)


def _encoded(number: int, sample: RewardInput, text: Literal["raw", "clean"]) -> str:
    """One sample in JSON. ValueError for values that JSON would change, such as tuples."""
    ours = {
        "prompt": sample.prompt,
        "response_raw": sample.raw,
        "response_clean": sample.clean,
    }
    for name, value in ({"answer": sample.answer} | sample.columns).items():
        try:
            is_json = json.loads(json.dumps(value, allow_nan=False)) == value
        except (TypeError, ValueError, RecursionError):
            is_json = False
        if not is_json:
            raise ValueError(
                f"prompt {sample.prompt_id[:12]}, column {name!r}: expected what JSON can hold "
                "(text, finite numbers, true, false, null, lists, objects with text as keys), "
                f"found {type(value).__name__} {str(value)[:80]!r}"
                " [RL2004]"
            )
    response = sample.raw if text == "raw" else sample.clean
    columns = sample.columns | ours
    return json.dumps(
        {"number": number, "response": response, "answer": sample.answer, "columns": columns}
    )


class _Worker:
    """A worker process, its unfinished samples, and when it began the first of them."""

    def __init__(self, function: str) -> None:
        self.function = function
        self.assigned: list[int] = []
        self.began = 0.0
        self.is_ready = False
        self.success_at: float | None = None
        self._unusable = ""
        self._since = time.monotonic()  # start of the process, or of its last assignment
        self.process = WorkerProcess("rltrain.environments.reward_worker", function)

    def assign(self, positions: list[int], lines: list[str]) -> None:
        self.assigned, self.began, self._since = positions, 0.0, time.monotonic()
        self.process.send(f"[{', '.join(lines)}]")

    def listen(self, success_at: float | None = None) -> dict[int, RewardResult]:
        """The results that have arrived, by position."""
        results: dict[int, RewardResult] = {}
        for message in self.process.receive():
            try:
                self._take(message, success_at, results)
            except (KeyError, TypeError, ValueError):
                self.process.fault = f"its process wrote {str(message)[:200]!r}, which is no result"
                break
        return results

    def _take(
        self, message: dict[str, Any], success_at: float | None, results: dict[int, RewardResult]
    ) -> None:
        if not self.is_ready:
            self._unusable = message.get("unusable", "")
            if not self._unusable:
                self.success_at = message["ready"]
                self.is_ready = True
        elif "began" in message:
            self.began = float(message["began"])
        else:
            if not self.assigned or message["sample"] != self.assigned[0]:
                raise ValueError("a result of another sample")
            result = _result(message, float(message["clock"]) - self.began, success_at)
            self.began = float(message["clock"])
            results[self.assigned.pop(0)] = result

    def start_failure(self) -> str:
        """Why the worker cannot be used. Empty while it starts, and once it is ready."""
        if self.is_ready:
            return ""
        if self._unusable:
            return self._unusable
        why = self.process.fault
        if not why and time.monotonic() - self._since > START_TIMEOUT_S:
            why = f"its process was not ready in {START_TIMEOUT_S:.0f} s"
        return why and f"data.reward.function={self.function} cannot be started: {why}"

    def failure(self, timeout_s: float) -> RewardResult | None:
        """The failure of the worker, if it failed. The caller then replaces it."""
        if not self.is_ready:
            why = self.start_failure()
            return RewardResult(None, "error", why, 0.0) if why else None
        now = time.monotonic()
        seconds = now - self.began if self.began else 0.0
        if self.process.fault:
            return RewardResult(None, "error", self.process.fault, seconds)
        # An unread message may be the result of this sample, so it is no timeout yet.
        if not self.assigned or self.process.has_message():
            return None
        if self.began and seconds > timeout_s:
            detail = f"not done in data.reward.timeout_s={timeout_s} s"
            return RewardResult(None, "timeout", detail, seconds)
        if not self.began and now - self._since > BEGIN_TIMEOUT_S:
            detail = f"its process did not begin in {BEGIN_TIMEOUT_S:.0f} s"
            return RewardResult(None, "error", detail, seconds)
        return None


def _result(message: dict[str, Any], seconds: float, success_at: float | None) -> RewardResult:
    if "error" in message:
        return RewardResult(None, "error", str(message["error"]), seconds)
    said = {name: message[name] for name in ("reward", "correct")}
    value, correct, parts = judgement(message["parts"] | said)
    if correct is None and success_at is not None:
        correct = value >= success_at
    return RewardResult(value, "ok", "", seconds, correct, parts)
