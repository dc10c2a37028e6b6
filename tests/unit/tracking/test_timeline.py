"""The timeline of a run: valid whenever it is read, and no slice cuts another."""

import json
from pathlib import Path

import pytest

from rltrain.config.trainer import TrackingConfig
from rltrain.tracking import timeline as written
from rltrain.tracking.timeline import Timeline
from rltrain.tracking.trace_events import (
    RUN,
    Span,
    count_of,
    earlier_lines,
    engine,
    in_order,
    line_of,
    names,
    rank,
    slice_of,
    thinned,
)
from rltrain.tracking.tracker import Tracker
from tests.timeline_file import check_nested, covered, read_timeline

WALL = 1_700_000_000.0


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def go_on(self, seconds: float = 1.0) -> float:
        """Returns the time before."""
        self.now += seconds
        return self.now - seconds


def timeline(path: Path, clock: Clock, first_step: int = 0) -> Timeline:
    return Timeline(path, first_step, clock, lambda: WALL + clock.now)


def phase(drawn: Timeline, clock: Clock, name: str, seconds: float = 1.0) -> None:
    drawn.phase(name)
    clock.go_on(seconds)
    drawn.phase(None)


# Pure


def test_a_slice_a_count_and_names_are_events_of_the_format() -> None:
    span = Span(rank("critic", 3), "update", 1_000, 3_500, {"n": 1})
    place = {"pid": 4, "tid": 400_003}
    slice = {"name": "update", "ph": "X", "ts": 1_000, "dur": 2_500, "args": {"n": 1}}
    assert slice_of(span) == slice | place
    count = {"name": "engine 2", "ph": "C", "ts": 5, "args": {"requests": 64}}
    assert count_of(engine(2), 5, 64) == count | {"pid": 2, "tid": 200_002}
    said = {event["name"]: event["args"] for event in names(engine(2))}
    assert said["process_name"] == {"name": "rollout"} and said["thread_name"]["name"] == "engine 2"
    assert said["process_sort_index"] == said["thread_sort_index"] == {"sort_index": 2}


def test_tracks_are_told_apart_by_their_tid_alone() -> None:
    tracks = [RUN, engine(0), engine(999), rank("policy", 0), rank("policy", 999)]
    assert len({track.place["tid"] for track in tracks}) == len(tracks)


def test_what_holds_another_comes_before_it() -> None:
    outer, inner = (slice_of(Span(RUN, "x", 10, end)) for end in (30, 20))
    later = count_of(engine(0), 15, 1)
    assert in_order([later, inner, outer]) == [outer, inner, later]


@pytest.mark.parametrize("count", [0, 1, 4, 5, 6, 1000])
def test_of_many_points_a_few_are_kept_with_both_ends(count: int) -> None:
    points = list(range(count))
    kept = thinned(points, 5)
    assert len(kept) == min(5, count) and kept == sorted(set(kept))
    assert kept[:1] == points[:1] and kept[-1:] == points[-1:]


def test_only_whole_events_of_an_earlier_file_are_kept() -> None:
    line = line_of({"name": "a"})
    torn = b'{"name":"b",\n\0\0\0\n7,\n{"na'
    ended = line_of({"name": "c"}).replace(",\n", "\n]\n")
    assert earlier_lines(f"[\n{line}".encode() + torn) == line
    assert earlier_lines(f"[\n{line}{ended}".encode()) == line + line_of({"name": "c"})


# A run


def test_phases_lie_in_their_step_and_times_are_wall_clock(tmp_path: Path) -> None:
    clock = Clock()
    drawn = timeline(tmp_path / "t.json", clock)
    drawn.phase("eval")  # of step 0: nobody says when it ends
    clock.go_on()
    drawn.end_step()
    drawn.begin_step(1)
    phase(drawn, clock, "generate", 2.0)
    phase(drawn, clock, "update", 1.5)
    clock.go_on(0.5)
    drawn.end_step()
    drawn.close("finished")
    trace = read_timeline(tmp_path / "t.json")
    found = [(s["name"], s["ts"], s["dur"]) for s in trace.tracks["steps and phases"]]
    at = int((WALL + 100) * 1e6)
    assert found == [
        ("eval", at, 1_000_000),
        ("step 1", at + 1_000_000, 4_000_000),
        ("generate", at + 1_000_000, 2_000_000),
        ("update", at + 3_000_000, 1_500_000),
    ]
    step, *phases = trace.tracks["steps and phases"][1:]
    assert covered(step, phases) == pytest.approx(3.5 / 4)
    assert [event["name"] for event in trace.of("i")] == ["finished"]


def test_an_engine_has_a_slice_while_it_has_requests_and_a_count_of_them(tmp_path: Path) -> None:
    clock = Clock()
    drawn = timeline(tmp_path / "t.json", clock)
    for requests in (64, 128, 64, 96, 0, 0, 32):
        drawn.load(1, requests)
        clock.go_on()
    with drawn.weight_sync(engines=2, ranks=1):  # in flight: requests stay
        drawn.answered("policy", 0, "begin_weight_stream", clock.go_on(0.5))
        clock.go_on(0.5)
    drawn.end_step()
    clock.go_on()
    drawn.close("failed")
    trace = read_timeline(tmp_path / "t.json")
    (first, second, sync), (alone,) = trace.tracks["engine 1"], trace.tracks["engine 0"]
    assert (first["dur"], first["args"]) == (4_000_000, {"requests": 160})
    assert (second["dur"], second["args"]) == (3_000_000, {"requests": 32})
    assert sync["name"] == alone["name"] == "weight_sync" and sync["ts"] == second["ts"] + 1_000_000
    assert [s["name"] for s in trace.tracks["policy rank 0"]] == [
        "weight_sync",
        "begin_weight_stream",
    ]
    assert trace.counts(1) == [64, 128, 64, 96, 0, 0, 32, 0]


def test_ranks_answer_each_at_its_time(tmp_path: Path) -> None:
    clock = Clock()
    drawn = timeline(tmp_path / "t.json", clock)
    began = clock.go_on()
    for number in range(written.MOST_RANKS + 1):
        drawn.answered("policy", number, "update", began)
        clock.go_on()
    drawn.answered("critic", 0, "values", began)
    drawn.close("finished")
    tracks = read_timeline(tmp_path / "t.json").tracks
    assert len(tracks) == written.MOST_RANKS + 1 and "critic rank 0" in tracks
    assert [tracks[f"policy rank {n}"][0]["dur"] for n in (0, 1)] == [1_000_000, 2_000_000]


def test_a_step_writes_once_and_what_it_writes_is_bounded(tmp_path: Path) -> None:
    path, clock = tmp_path / "t.json", Clock()
    drawn = timeline(path, clock)
    drawn.begin_step(1)
    for requests in [*range(1, 5000), 0]:
        drawn.load(0, requests)
        clock.go_on(0.001)
    assert path.read_text() == "[\n"
    drawn.end_step()
    assert len(path.read_text()) < 100 * (written.MOST_COUNTS + 12)
    counts = read_timeline(path).counts(0)  # it is valid before the run has ended
    assert len(counts) == written.MOST_COUNTS and counts[-1] == 0


def test_a_run_that_goes_on_keeps_what_was_there(tmp_path: Path) -> None:
    path, clock = tmp_path / "t.json", Clock()
    for first_step in (0, 1, 2, 2):
        drawn = timeline(path, clock, first_step)
        for step in (first_step, first_step + 1):
            drawn.begin_step(step)
            phase(drawn, clock, "update")
            drawn.end_step()
        drawn.begin_step(99)
        if first_step == 1:
            drawn.close("interrupted")
        else:  # killed: in the midst of a step, and of a line
            path.write_text(path.read_text() + '{"name":"upd')
        clock.go_on(60)
    path.write_text(path.read_text().rpartition("\n")[0] + "\n")
    trace = read_timeline(path)
    assert trace.steps == [f"step {n}" for n in (0, 1, 1, 2, 99, 2, 3, 2, 3)]
    marks = [event["name"] for event in trace.of("i")]
    assert marks == ["goes on after step 0", "interrupted", *["goes on after step 1"] * 2]
    timeline(path, clock).close("finished")  # a fresh run has a new file
    assert "update" not in path.read_text()


def test_slices_that_cut_each_other_are_seen() -> None:
    cut = [slice_of(Span(RUN, "x", begin, begin + 10)) for begin in (0, 5)]
    with pytest.raises(AssertionError, match="overlaps"):
        check_nested("run", cut)


def test_the_tracker_writes_it(tmp_path: Path) -> None:
    with (
        pytest.raises(RuntimeError, match="engine died"),
        Tracker(tmp_path, TrackingConfig(backends=[]), {}, {}, num_steps=4) as tracker,
    ):
        tracker.timeline.begin_step(1)
        tracker.phase("update")
        tracker.log(1, {"reward/mean": 0.5})
        assert json.loads((tmp_path / "timeline.json").read_text().rstrip(",\n") + "]")
        tracker.timeline.begin_step(2)
        tracker.phase("generate")
        raise RuntimeError("engine died")
    trace = read_timeline(tmp_path / "timeline.json")
    found = {s["name"] for s in trace.tracks["steps and phases"]}
    assert found == {"step 1", "update", "step 2", "generate"}
    assert [event["name"] for event in trace.of("i")] == ["failed"]
