"""Waiting for actors. Every wait has a name and a limit, and raises `ActorFailed` on failure."""

import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from signal import Signals
from typing import Any, Literal, NamedTuple

import ray
from ray._private import state
from ray.core.generated.common_pb2 import ActorDiedErrorContext
from ray.exceptions import (
    GetTimeoutError,
    RayActorError,
    RayError,
    RayTaskError,
    UnserializableException,
)

from rltrain.actors.actor_log import FOLDER, LOG, find_log, log_of_process, node_of_log, own_log
from rltrain.actors.call_limits import LIMITS
from rltrain.actors.host_memory import describe_kill, describe_memory, oom_kills
from rltrain.actors.last_error import last_error, last_line, strip_ray_frames
from rltrain.actors.run_nodes import dump_stacks, fetch_logs, lost_node, memory_of, several_nodes
from rltrain.config.error_codes import with_code
from rltrain.config.redact import strip_terminal_codes
from rltrain.parallel.rendezvous import within

POLL_S = 5.0
"""How often a wait checks whether another actor of the run has died."""
LOOK_S = 0.2
"""How often a wait checks whether the run's nodes and Ray itself live. Without its raylet, Ray ends
this process at the next call that needs it, without a word."""
WORK_S = 0.05
"""How often a wait does the work of `meanwhile`."""
FETCH_S = 60.0
"""Limit of the way of an answer that is there: to this process, from its own node."""
GCS_S = 60.0
"""Limit of an answer of Ray's control service."""
DEATH_NOTICE_S = 5.0
"""How long after a failure the death of another actor may be reported as its cause."""
NEAR_THE_END = 30
"""Lines. After a signal, an error further from the end of the log did not end the process."""
CODES = {"raised": "RL4009", "died": "RL4007", "silent": "RL4008"}
"""By kind of failure; an error that has a code of its own keeps it."""
LOG_NAMES = {"rollout": "engine"}
"""Names of logs that differ from the role."""
NODE_DIED = "node has died"
"""What Ray says of an actor on a node that was lost."""
_KILLS_BEFORE = oom_kills()
_spared: list[str] = []
_work: list[Callable[[], None]] = []


FACTOR = "cluster.phase_timeout_factor"


class ActorFailed(RuntimeError):
    """An actor raised an error, died, or did not answer within the limit.

    Args:
        kind: which of the three
        where: the call that failed, as ``role.method``
        error: the actor's error, in a sentence
        of_peer: whether the actor lives, and one that it needs died
    """

    def __init__(
        self,
        kind: Literal["raised", "died", "silent"],
        where: str,
        error: str,
        *,
        of_peer: bool = False,
    ) -> None:
        super().__init__(with_code(f"{where}: {error}", CODES[kind]))
        self.kind = kind
        self.where = where
        self.of_peer = of_peer

    def __reduce__(self) -> Any:
        return _rebuilt, (self.kind, self.where, str(self), self.of_peer)


def _rebuilt(
    kind: Literal["raised", "died", "silent"], where: str, text: str, of_peer: bool
) -> ActorFailed:
    return ActorFailed(kind, where, text.removeprefix(f"{where}: "), of_peer=of_peer)


class ChildDied(RuntimeError):
    """Raised within an actor when a process that it started has died. The text is for the user."""


class PeerDied(ChildDied):
    """Raised within an actor when another actor died, or hangs, that it cannot do without: it would
    not help to start this one again."""


class AwaitedCall(NamedTuple):
    """The call whose answers are waited for."""

    role: str
    method: str
    key: str = "cluster.call_timeout_s"
    """The configuration key that limits the wait."""

    def __str__(self) -> str:
        return f"{self.role}.{self.method}"

    @property
    def kind(self) -> str:
        """Of which earlier calls it is known how long they took."""
        return f"{self.role}.{self.method.partition(',')[0]}"

    def limited(self, most_s: float) -> "tuple[AwaitedCall, float]":
        """The call with what limits it, and its limit in seconds: ``most_s``, or what was learned
        of earlier calls."""
        limit_s = LIMITS.limit(self.kind, most_s)
        return (self if limit_s == most_s else self._replace(key=FACTOR)), limit_s


@contextmanager
def sparing(*classes: str) -> Iterator[None]:
    """Within, the death of an actor of these classes, and of no others, does not end the wait for
    other actors: whoever uses it next starts it again."""
    before = _spared[:]
    _spared[:] = classes
    try:
        yield
    finally:
        _spared[:] = before


@contextmanager
def meanwhile(work: Callable[[], None]) -> Iterator[None]:
    """Within, this process does some work every ``WORK_S`` while it waits for actors. What the work
    raises ends the wait."""
    _work.append(work)
    try:
        yield
    finally:
        _work.remove(work)


def _wait_some(
    refs: Sequence[Any], call: AwaitedCall, timeout_s: float
) -> tuple[list[Any], list[Any]]:
    """As `ray.wait`, with the work of `meanwhile`, which may itself wait for actors; raises as
    `check_nodes`."""
    until = time.monotonic() + timeout_s
    while True:
        left = max(0.0, until - time.monotonic())
        done, waiting = ray.wait(list(refs), timeout=min(left, WORK_S if _work else LOOK_S))
        if done or left == 0:
            return done, waiting
        check_nodes(call)
        work, _work[:] = _work[:], []
        try:
            for one in work:
                one()
        finally:
            _work[:] = work


def get_all(
    refs: Sequence[Any],
    call: AwaitedCall,
    timeout_s: float,
    on_answer: Callable[[int], None] = lambda number: None,
) -> list[Any]:
    """The answers of actors, in the order of ``refs``.

    The first failure ends the wait, since other actors may wait for the failed one for ever. The
    death of any other actor of this run ends it, too, but for those of `sparing`.

    Args:
        on_answer: is told the place of each answer in ``refs`` as it comes

    Raises:
        ActorFailed: an actor raised, died, or did not answer within ``timeout_s``.
    """
    check_nodes(call)
    began, answers = time.time(), dict[Any, Any]()
    waiting, (call, limit_s) = list(refs), call.limited(timeout_s)
    places = {ref: number for number, ref in enumerate(refs)}
    while waiting:
        left = began + limit_s - time.time()
        done, waiting = _wait_some(waiting, call, max(0.0, min(POLL_S, left)))
        for ref in done:
            try:
                answers[ref] = ray.get(ref, timeout=FETCH_S)
            except RayError as error:
                raise call_failure(error, call, others=waiting) from error
            on_answer(places[ref])
        if not done:
            check_others(call, began)
            if left <= 0:
                raise timeout_failure(call, len(waiting), len(refs), limit_s)
    LIMITS.took(call.kind, time.time() - began)
    return [answers[ref] for ref in refs]


def check_others(call: AwaitedCall, since: float) -> None:
    """
    Raises:
        ActorFailed: a node of the run was lost, another actor has died since then, in seconds since
            1970, or Ray does not say so.
    """
    check_nodes(call)
    try:
        dead = describe_deaths(since)
    except TimeoutError as error:
        silent = f"Ray's control service (GCS) did not answer within {GCS_S:g} s: see {_logs()}"
        raise ActorFailed("silent", str(call), silent) from error
    if dead:
        raise ActorFailed("died", str(call), dead[0])


def check_nodes(call: AwaitedCall) -> None:
    """
    Raises:
        ActorFailed: a node of the run was lost.
    """
    if lost := lost_node():
        raise ActorFailed("died", str(call), lost)


def call_failure(error: RayError, call: AwaitedCall, others: Sequence[Any] = ()) -> ActorFailed:
    """The failure that an error of a call stands for.

    Args:
        others: answers that are still to come. A collective fails when another rank dies, and the
            call may fail before that death is known.
    """
    if not isinstance(error, RayActorError) and others:
        done, _ = ray.wait(list(others), num_returns=len(others), timeout=DEATH_NOTICE_S)
        for ref in done:
            try:
                ray.get(ref, timeout=FETCH_S)
            except RayActorError as death:
                error = death
                break
            except RayError:
                continue
    fetch_logs()
    if lost := lost_node():
        return ActorFailed("died", str(call), lost)
    if isinstance(error, RayTaskError):
        # One that cannot start would not start the next time either.
        died = isinstance(error.cause, ChildDied) and call.method != "start"
        kind: Literal["died", "raised"] = "died" if died else "raised"
        of_peer = isinstance(error.cause, PeerDied)
        return ActorFailed(kind, str(call), _raised(call.role, error), of_peer=of_peer)
    if isinstance(error, GetTimeoutError):
        late = f"it has answered, and nothing arrived within {FETCH_S:g} s: see `ray status`"
        return ActorFailed("silent", str(call), late)
    if isinstance(error, UnserializableException):  # of a class that is unknown here, say
        cause = last_error(str(error))
        return ActorFailed(
            "raised", str(call), cause.text if cause else strip_ray_frames(str(error))
        )
    if isinstance(error, RayActorError):
        return ActorFailed("died", str(call), _death(call.role, error))
    return ActorFailed(
        "died", str(call), f"{type(error).__name__}: {strip_terminal_codes(str(error))}"
    )


def _raised(role: str, error: RayTaskError) -> str:
    cause, text = error.cause, strip_terminal_codes(str(error.cause))
    # Ray mixes the class of the error with that of the cause, which has no field for the pid.
    place = re.search(r"\(pid=(\d+), ip=([^,)\s]+)", strip_terminal_codes(str(error)))
    log = find_log(int(place[1]), place[2]) if place else None
    who = f"{name_of_log(log, place[2])}: " if place and log and several_nodes() else ""
    if isinstance(cause, ChildDied):
        return who + text
    message = f"{type(cause).__name__}: {text}" if text else type(cause).__name__
    remedy = out_of_memory(role, message)
    return f"{who}{message}{remedy}" + (f"\nFull log: {log}" if log is not None else "")


def out_of_memory(role: str, error: str) -> str:
    """The remedy for an error of a GPU's memory; "" for another error."""
    if "outofmemoryerror" not in error.lower() and "out of memory" not in error.lower():
        return ""
    if role == "rollout":
        return "\nLower rollout.gpu_memory_utilization or rollout.engine_args.max_num_seqs [RL4011]"
    return (
        "\nLower policy.max_tokens_per_micro_batch, set policy.recompute=full, or split the model "
        "over more ranks (rltrain plan shows what is held) [RL4011]"
    )


def _death(role: str, error: RayActorError) -> str:
    text = strip_terminal_codes(str(error))
    if error.actor_init_failed or "creation task" in text:
        cause = last_error(f"Traceback (most recent call last):\n{text}")
        return f"an actor could not be created: {cause.text if cause else text}"
    pid = re.search(r"^\tpid: (\d+)$", text, re.MULTILINE)
    node = re.search(r"^\tip: (\S+)$", text, re.MULTILINE)
    return describe_death(role, int(pid[1]) if pid else 0, text, node[1] if node else None)


def timeout_failure(call: AwaitedCall, missing: int, asked: int, timeout_s: float) -> ActorFailed:
    """The failure of a wait that reached its limit.

    Args:
        missing: how many of the ``asked`` actors did not answer
    """
    last = _last_lines(call.role)
    dump_stacks()
    fetch_logs()
    if lost := lost_node():
        return ActorFailed("died", str(call), lost)
    return ActorFailed(
        "silent",
        str(call),
        f"expected an answer of all {asked} within {timeout_s:g} s, and {missing} did not answer. "
        f"One hangs or is slow: raise {call.key}, or see {_logs()}, where each log ends with what "
        f"its actor was doing{last}",
    )


def _last_lines(role: str) -> str:
    """The last line of each actor's log."""
    folder = os.environ.get(FOLDER)
    files = sorted(Path(folder).glob(f"{LOG_NAMES.get(role, role)}-*.log")) if folder else []
    texts = {file: file.read_text(errors="replace") for file in files}
    lines = [
        f"\n{file.name}{_on_node(node_of_log(text))}: {last_line(text)}"
        for file, text in texts.items()
    ]
    return "".join(lines)


def describe_deaths(since: float) -> list[str]:
    """A description of each actor of this run that has died by itself, in the order of deaths; not
    of those of `sparing`.

    Args:
        since: deaths from then on, in seconds since 1970
    Raises:
        TimeoutError: Ray does not answer.
    """
    job = ray.JobID.from_hex(ray.get_runtime_context().get_job_id())
    dead = [
        (actor, actor["DeathCause"].actor_died_error_context)
        for actor in within(
            GCS_S, lambda: state.actors(job_id=job, actor_state_name="DEAD")
        ).values()
        if actor["EndTime"] >= 1000 * since
    ]
    by_itself = [
        (actor, context)
        for actor, context in sorted(dead, key=lambda death: death[0]["EndTime"])
        if context.reason in (ActorDiedErrorContext.WORKER_DIED, ActorDiedErrorContext.NODE_DIED)
        and actor["ActorClassName"] not in _spared
    ]
    if by_itself:
        fetch_logs()
    return [
        describe_death(
            actor["ActorClassName"],
            actor["Pid"],
            context.error_message,
            actor["Address"]["IPAddress"],
        )
        for actor, context in by_itself
    ]


def describe_death(role: str, pid: int, ray_message: str, node: str | None = None) -> str:
    """The death of an actor, with the error that its log shows.

    Args:
        role: the kind of actor, for one that has no log
        ray_message: what Ray reports
        node: where it was
    """
    log = find_log(pid, node)
    written = log_of_process(log.read_text(errors="replace"), pid, node) if log is not None else ""
    code = re.search(r"exit code -?\d+", ray_message)
    ended = "SIGTERM" if "receives a SIGTERM" in ray_message else code[0] if code else ""
    name = name_of_log(log, node) if log is not None else f"an actor of {role}{_on_node(node)}"
    if NODE_DIED in ray_message:
        last = f' The last line of its log: "{last_line(written)}".' if written else ""
        return f"{name} (process {pid}) died with its node: see `ray status`.{last} [RL4020]"
    error = describe_last_error(written, ended, node)
    return f"{name} (process {pid}) died. {error} Full log: {log or _logs()}"


def name_of_log(log: Path, node: str | None) -> str:
    """The actor of a log, with its node where the run has more than one."""
    return actor_name(log.stem) + _on_node(node)


def _on_node(node: str | None) -> str:
    return f" on node {node}" if node and several_nodes() else ""


def actor_name(stem: str) -> str:
    """The actor of a log, in words: ``rollout engine 0`` for ``engine-0``."""
    role, _, rank = stem.rpartition("-")
    return {"engine": "rollout engine"}.get(role, f"{role} worker") + f" {rank}"


def child_failure(event: str, codes: Mapping[str, int | None]) -> ChildDied:
    """The failure of processes that this actor started.

    Args:
        event: which processes died, and when
        codes: their exit codes by name; a negative code is a signal
    """
    file = own_log()
    text = file.read_text(errors="replace") if file is not None and file.is_file() else ""
    written = log_of_process(text, os.getpid())
    ended = [Signals(-n).name if n < 0 else f"exit code {n}" for n in codes.values() if n]
    log = f" Full log: {os.environ[LOG]}" if text else ""
    return ChildDied(f"{event}. {describe_last_error(written, ended[0] if ended else '')}{log}")


def describe_last_error(written: str, ended: str, node: str | None = None) -> str:
    """Sentences about the error of a process that died.

    Args:
        written: its log
        ended: ``exit code 3``, ``SIGKILL``; "" where it is not known
        node: where it was, if that may be another machine
    """
    error = last_error(written, within=None if ended.startswith("exit code") else NEAR_THE_END)
    if error is not None and ended != "SIGKILL":
        return f"Its last error: {error}."
    line = last_line(written)
    last = f' The last line of its log: "{line}".' if line else ""
    if ended in ("SIGKILL", ""):
        end = "It was killed (SIGKILL)" if ended else "It was killed, or ended at once,"
        kills, memory = memory_of(node) or (oom_kills() - _KILLS_BEFORE, describe_memory())
        return f"{end} and left no error. {describe_kill(kills, memory)}.{last}"
    return f"It ended with {ended} and left no error.{last}"


def _logs() -> str:
    return os.environ.get(FOLDER) or "ray-logs in the run's folder"
