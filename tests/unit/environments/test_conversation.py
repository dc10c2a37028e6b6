"""Whatever a reward worker writes, and whenever, the pool goes on by its own clock."""

import json
import math
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rltrain.environments.conversation import LONGEST_LINE, MOST_MESSAGES, Conversation, Lines
from rltrain.environments.reward_sample import RewardResult
from rltrain.environments.rewards import LARGEST, LONGEST_DETAIL

NOW = 1000.0
TIMEOUT_S = 10.0


def result(number: object, clock: object, **more: object) -> dict[str, Any]:
    return {"sample": number, "clock": clock, "reward": 1.0, "correct": None, "parts": {}} | more


def call(name: object, clock: object) -> dict[str, Any]:
    return {"call": name, "clock": clock}


def ready(positions: list[int], success_at: float | None = None) -> Conversation:
    worker = Conversation(NOW - 100)
    worker.take({"ready": success_at}, NOW - 50, None)
    worker.assign([(position,) for position in positions], NOW)
    return worker


def begun(positions: list[int]) -> Conversation:
    worker = ready(positions)
    worker.take({"began": NOW}, NOW, None)
    return worker


CLOCKS = [math.nan, math.inf, -math.inf, True, False, 10**400, 5, "5", None, [], {}, [NOW]]


@pytest.mark.parametrize("clock", CLOCKS, ids=lambda clock: str(clock)[:9])
def test_a_clock_that_is_no_finite_number_is_refused(clock: object) -> None:
    with pytest.raises(ValueError, match="which is no result"):
        ready([0]).take({"began": clock}, NOW, None)
    with pytest.raises(ValueError, match="which is no result"):
        begun([0]).take(result(0, clock), NOW + 1, None)


@pytest.mark.parametrize(("said", "taken"), [(-1e300, NOW), (0.0, NOW), (1e300, NOW + 3)])
def test_a_clock_in_the_past_or_future_is_moved_to_what_the_pool_knows(
    said: float, taken: float
) -> None:
    worker = ready([4, 5])
    worker.take({"began": said}, NOW + 3, None)
    assert worker.deadline(TIMEOUT_S) == taken + TIMEOUT_S
    worker = begun([4, 5])
    assert worker.take(result(4, said), NOW + 3, None)[4].seconds == taken - NOW
    assert worker.began == taken


def test_the_times_of_an_honest_worker_are_its_own() -> None:
    worker = ready([0, 1])
    worker.take({"began": NOW + 1}, NOW + 60, None)
    assert worker.take(result(0, NOW + 3.5), NOW + 60, None)[0].seconds == 2.5
    assert worker.take(result(1, NOW + 4), NOW + 60, None)[1].seconds == 0.5
    assert worker.deadline(TIMEOUT_S) == math.inf  # it has nothing to do


@pytest.mark.parametrize(
    "messages",
    [
        [{"began": NOW}],
        [result(0, NOW), {"began": NOW}],
        [result(0, NOW), result(0, NOW)],
        [result(1, NOW)],
        [result(True, NOW)],
        [result(0.0, NOW)],
        [result("0", NOW)],
        [result(0, NOW), result(1, NOW), result(2, NOW)],
        [result(0, NOW), result(1, NOW), {"began": NOW}],
        [result(0, NOW, parts=[])],
        [result(0, NOW, reward=math.nan)],
        [result(0, NOW, reward=10**400)],
        [result(0, NOW, correct=1)],
        [{"sample": 0, "clock": NOW, "error": ["x"]}],
        [{"sample": 0, "clock": NOW}],
        [call("a", NOW)],
        [{"ready": None}],
        [{"unusable": "now"}],
        [{}],
    ],
)
def test_only_the_message_that_is_due_is_taken(messages: list[dict[str, Any]]) -> None:
    worker = begun([0, 1])
    for message in messages[:-1]:
        worker.take(message, NOW, None)
    before = list(worker.assigned)
    with pytest.raises(ValueError, match=r"^wrote .*, which is no result"):
        worker.take(messages[-1], NOW, None)
    assert worker.assigned == before


def with_components(*names: str) -> Conversation:
    worker = Conversation(NOW - 100, names)
    worker.take({"ready": None}, NOW - 50, None)
    worker.assign([(0,), (1,)], NOW)
    return worker


def test_the_clock_starts_with_each_call_and_the_time_of_a_sample_with_the_first() -> None:
    worker = with_components("a", "b")
    worker.take({"began": NOW}, NOW, None)
    assert worker.component == ""
    worker.take(call("a", NOW + 1), NOW + 9, None)
    worker.take(call("b", NOW + 6), NOW + 9, None)
    assert worker.component == "b" and worker.deadline(TIMEOUT_S) == NOW + 6 + TIMEOUT_S
    assert worker.take(result(0, NOW + 8), NOW + 9, None)[0].seconds == 8
    assert worker.component == "" and worker.deadline(TIMEOUT_S) == NOW + 8 + TIMEOUT_S


def in_groups(*groups: tuple[int, ...], components: tuple[str, ...] = ()) -> Conversation:
    worker = Conversation(NOW - 100, components)
    worker.take({"ready": None, "takes_groups": True}, NOW - 50, None)
    worker.assign(list(groups), NOW)
    worker.take({"began": NOW}, NOW, None)
    return worker


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_the_results_of_a_group_come_all_at_once_or_never(
    sizes: list[int], data: st.DataObject
) -> None:
    numbers = iter(range(sum(sizes)))
    groups = [tuple(next(numbers) for _ in range(size)) for size in sizes]
    worker, seen, now = in_groups(*groups), dict[int, RewardResult](), NOW
    for said in range(data.draw(st.integers(0, sum(sizes)))):
        now += 1
        seen |= worker.take(result(said, now), now, None)
        assert sorted([*seen, *(n for g in worker.assigned for n in g)]) == list(range(sum(sizes)))
        assert all(set(group) <= seen.keys() or not set(group) & seen.keys() for group in groups)
        finished = sum(len(group) for group in groups if set(group) <= seen.keys())
        assert sum(one.seconds for one in seen.values()) == pytest.approx(finished)
    assert worker.takes_groups


@pytest.mark.parametrize(
    "messages",
    [
        [result(1, NOW)],
        [result(0, NOW), result(2, NOW)],
        [result(0, NOW), result(0, NOW)],
        [result(0, NOW), call("a", NOW)],
        [call("a", NOW), call("a", NOW), call("a", NOW)],
        [call("a", NOW), call("b", NOW), call("a", NOW)],
    ],
)
def test_only_what_is_due_in_a_group_is_taken(messages: list[dict[str, Any]]) -> None:
    worker = in_groups((0, 1), (2, 3), components=("a", "b"))
    for message in messages[:-1]:
        assert worker.take(message, NOW, None) == {}
    with pytest.raises(ValueError, match="which is no result"):
        worker.take(messages[-1], NOW, None)
    assert worker.assigned == [(0, 1), (2, 3)]


@pytest.mark.parametrize(
    "messages",
    [
        [call("a", NOW)],
        [{"began": NOW}, call("b", NOW)],
        [{"began": NOW}, call("c", NOW)],
        [{"began": NOW}, call("a", NOW), call("a", NOW)],
        [{"began": NOW}, call("a", NOW), call("b", NOW), call("a", NOW)],
        [{"began": NOW}, call("a", math.nan)],
        [{"began": NOW}, call(["a"], NOW)],
    ],
)
def test_a_call_that_is_not_due_gives_no_more_time(messages: list[dict[str, Any]]) -> None:
    worker = with_components("a", "b")
    for message in messages[:-1]:
        worker.take(message, NOW, None)
    with pytest.raises(ValueError, match="which is no result"):
        worker.take(messages[-1], NOW, None)
    assert worker.deadline(TIMEOUT_S) in (NOW + TIMEOUT_S, math.inf)


@pytest.mark.parametrize(
    "message",
    [
        *({}, {"unusable": ""}, {"unusable": 3}, {"ready": "1"}, {"ready": math.nan}),
        *({"ready": True}, {"ready": 10**400}, {"began": NOW}, result(0, NOW)),
    ],
)
def test_a_start_that_is_none_is_refused(message: dict[str, Any]) -> None:
    worker = Conversation(NOW)
    with pytest.raises(ValueError, match="which is no result"):
        worker.take(message, NOW, None)
    assert not worker.is_ready


def test_what_a_worker_says_of_an_error_is_short_and_can_be_shown() -> None:
    text = "\x1b[2J\ud800" + "x" * 5000
    error = begun([0]).take({"sample": 0, "clock": NOW, "error": text}, NOW, None)[0]
    assert error.detail.startswith("\\x1b[2J\\ud800xx") and len(error.detail) < LONGEST_DETAIL + 99
    assert error.detail.encode() and error.detail.isprintable()


def test_messages_before_one_that_is_none_are_kept() -> None:
    lines = Lines()
    assert lines.feed(b'{"a": 1}\n{"b') == [{"a": 1}]
    assert lines.feed(b'": 2}\nno\n{"c": 3}\n') == [{"b": 2}]
    assert lines.fault == "wrote b'no', which is no message"


@pytest.mark.parametrize(
    "line", [b"[1]", b"1", b"null", b"{", b"\xff", b'{"a": ' + b"9" * 5000 + b"}", b"[" * 100_000]
)
def test_a_line_that_is_no_object_is_a_fault(line: bytes) -> None:
    lines = Lines()
    assert lines.feed(line + b"\n") == [] and "which is no message" in lines.fault


def test_too_much_at_once_is_a_fault() -> None:
    lines = Lines()
    assert len(lines.feed(b"{}\n" * (MOST_MESSAGES + 1))) == MOST_MESSAGES
    assert f"more than {MOST_MESSAGES} messages" in lines.fault
    lines = Lines()
    for _ in range(LONGEST_LINE // 65536):
        lines.feed(b" " * 65536)
    assert lines.fault == ""
    lines.feed(b" ")
    assert "a message of more than 1048576 bytes" in lines.fault


VALUES: list[Any] = [
    *(None, True, False, 0, 1, 2, -1, 10**30, 10**400, 0.0, 0.5, -0.0, 1e300, -1e300, math.nan),
    *(math.inf, -math.inf, "", "x", "\ud800", "\x1b[2J", "9" * 5000, [], {}, [[]], {"a": 1}),
    *(NOW, NOW - 1, NOW + 1, NOW + 1e9, 1e-300, {"reward": 1.0}, {"format": 0.5}, {"": 1}),
]
KEYS = ["ready", "unusable", "began", "sample", "clock", "reward", "correct", "parts", "error", "x"]
KEYS += ["call"]


def hostile_message(dice: random.Random, worker: Conversation, now: float) -> dict[str, Any]:
    """Right, nearly right, or any."""
    due = worker.assigned[0][0] if worker.assigned else 0
    honest: list[dict[str, Any]] = [
        {"ready": None},
        {"began": now},
        result(due, now),
        result(due, now, parts={"format": 0.5}, correct=True),
        {"sample": due, "clock": now, "error": "it failed"},
    ]
    message = dict(dice.choice(honest))
    for _ in range(dice.choice([0, 0, 1, 1, 2, 5])):
        message[dice.choice([*message, dice.choice(KEYS)])] = dice.choice(VALUES)
    if message and dice.random() < 0.1:
        del message[dice.choice(list(message))]
    return message


def hostile_bytes(dice: random.Random, message: dict[str, Any]) -> bytes:
    line = json.dumps(message).encode() + b"\n"
    kind = dice.random()
    if kind < 0.05:
        return dice.randbytes(dice.randrange(40)) + b"\n"
    if kind < 0.1:
        at = dice.randrange(len(line))
        return line[:at] + dice.randbytes(1) + line[at + 1 :]
    return line if kind < 0.95 else line[: dice.randrange(len(line))] + b"\n"


def test_ten_thousand_hostile_messages_never_crash_hang_or_mistime_a_pool() -> None:
    """What holds after each: a worker is at fault, or its times lie within those of the pool."""
    dice, sent, accepted, faults = random.Random(0), 0, 0, 0
    while sent < 10_000:
        now = assigned_at = NOW
        worker, lines, seen = ready([3, 4, 5], 0.5), Lines(), dict[int, RewardResult]()
        at_fault = False
        while not at_fault and sent < 10_000:
            now += dice.choice([0.0, 0.001, 2.0])
            sent += 1
            piece = hostile_bytes(dice, hostile_message(dice, worker, now))
            for message in lines.feed(piece):
                try:
                    results = worker.take(message, now, 0.5)
                except ValueError as error:
                    assert str(error).startswith("wrote ") and str(error).isprintable()
                    at_fault = True
                    break
                assert not results.keys() & seen.keys()
                seen |= results
                accepted += 1
            at_fault |= bool(lines.fault)
            # The current sample's time runs, whatever was said.
            if worker.began is not None:
                assert assigned_at <= worker.began <= now
                assert worker.deadline(TIMEOUT_S) <= now + TIMEOUT_S
            assert sorted([*seen, *(n for (n,) in worker.assigned)]) == [3, 4, 5]
            assert sum(one.seconds for one in seen.values()) <= now - assigned_at
            for one in seen.values():
                check_result(one)
            if not worker.assigned:
                worker.assign([(3,), (4,), (5,)], now)
                assigned_at, seen = now, {}
        faults += at_fault
    assert accepted > 1000 and faults > 1000  # the fuzz reaches both


def check_result(one: RewardResult) -> None:
    assert one.seconds >= 0
    if one.status == "ok":
        assert type(one.value) is float and abs(one.value) <= LARGEST
        assert type(one.correct) is bool
        assert all(type(v) is float and math.isfinite(v) for v in one.parts.values())
    else:
        assert one.value is None and one.detail.isprintable() and len(one.detail) < 20_000


TEXT = st.text(max_size=3)
PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | TEXT
JSON = PLAIN | st.lists(PLAIN, max_size=2) | st.dictionaries(TEXT, PLAIN, max_size=2)
OBJECT = st.dictionaries(st.sampled_from(KEYS), JSON, max_size=5)


@settings(max_examples=30)
@given(st.lists(OBJECT, max_size=4))
def test_any_objects_are_taken_or_refused(messages: list[dict[str, Any]]) -> None:
    for worker in (Conversation(NOW), ready([0, 1]), begun([0, 1])):
        for message in messages:
            try:
                worker.take(message, NOW + 1, 0.5)
            except ValueError:
                break
        assert worker.began is None or NOW <= worker.began <= NOW + 1


@given(st.lists(st.binary(max_size=60), max_size=8))
def test_any_bytes_are_messages_or_a_fault(pieces: list[bytes]) -> None:
    whole, parts = Lines(), Lines()
    once = whole.feed(b"".join(pieces))
    bit_by_bit = [message for piece in pieces if not parts.fault for message in parts.feed(piece)]
    assert (once, whole.fault) == (bit_by_bit, parts.fault)
