"""Every call has one place, also when engines die and come back."""

from collections import deque
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from rltrain.rollout.dispatch_board import Board, RequestBatch, Running
from rltrain.rollout.requests import Request

REQUEST = Request((1,), 0, "p", 0)


def batch(number: int, size: int = 1, engine: int | None = None) -> RequestBatch:
    return RequestBatch([number], [REQUEST] * size, engine)


def board(calls: Sequence[RequestBatch], has: Sequence[int], max_requests: float = 4) -> Board:
    """Of engines that have so many requests."""
    made = Board(deque(calls), len(has), max_requests)
    for engine, count in enumerate(has):
        made.sent(f"earlier {engine}", Running(batch(-engine, count), engine, ""))
    return made


def test_a_call_goes_to_the_engine_with_the_fewest_requests() -> None:
    anywhere, second = batch(0), batch(1, engine=1)
    assert board([anywhere], [3, 2, 2]).place() == (anywhere, 1)
    assert board([anywhere], [3, 2, 2]).place(away={1}) == (anywhere, 2)
    assert board([anywhere], [4, 4]).place() is None
    assert board([anywhere], [4, 3]).place() == (anywhere, 1)
    assert board([anywhere], [4, 3]).place(away={1}) is None
    assert board([anywhere], [0, 0]).place(away={0, 1}) is None
    assert board([second], [0, 99]).place() == (second, 1)
    # One that waits for its own engine does not hold up those behind it.
    first = batch(2, engine=0)
    assert board([second, first], [9, 9]).place(away={1}) == (first, 0)
    assert board([second], [9, 9]).place(away={1}) is None


def test_an_engine_that_hangs_is_shown_with_its_queue() -> None:
    assert board([batch(0, 2), batch(1)], [3, 5]).describe(1) == "5 requests there, 3 queued"


STEPS = st.lists(st.tuples(st.sampled_from(["answer", "die", "back"]), st.integers(0, 99)))


@given(
    st.lists(st.integers(1, 3), min_size=1, max_size=12),
    st.integers(1, 3),
    st.booleans(),
    STEPS,
)
def test_every_call_is_answered_once_whatever_dies(
    sizes: list[int], engines: int, bound: bool, steps: list[tuple[str, int]]
) -> None:
    calls = [batch(n, size, n % engines if bound else None) for n, size in enumerate(sizes)]
    found, away, answered, ref = Board(deque(calls), engines, 4), set[int](), list[int](), 0

    def send() -> None:
        nonlocal ref
        while (placed := found.place(away)) is not None:
            call, engine = placed
            assert engine not in away and call.engine in (None, engine)
            found.sent(ref, Running(call, engine, ""))
            ref += 1

    def answer(number: int) -> None:
        chosen = sorted(found.running)[number % len(found.running)]
        answered.append(found.running[chosen].call.groups[0])
        found.answered(chosen)

    for what, number in steps:
        send()
        if what == "answer" and found.running:
            answer(number)
        elif what == "die" and (engine := number % engines) not in away:
            had = [one.call for one in found.running.values() if one.engine == engine]
            away.add(engine)
            found.take_back(engine)
            assert list(found.waiting)[: len(had)] == had
        elif what == "back":
            away.discard(number % engines)
        for engine in range(engines):
            own = [len(o.call.requests) for o in found.running.values() if o.engine == engine]
            assert found.load[engine] == sum(own)
    away.clear()
    while found.waiting or found.running:
        send()
        answer(0)
    assert sorted(answered) == list(range(len(calls)))
