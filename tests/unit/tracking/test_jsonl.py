"""metrics.jsonl survives kills, resumes and full disks."""

import errno
import json
import math

import pytest

from rltrain.tracking.jsonl import JsonlWriter, read_jsonl


def _steps(path):
    return [row["step"] for row in read_jsonl(path)]


def test_a_line_is_on_disk_as_soon_as_it_is_written(tmp_path):
    path = tmp_path / "metrics.jsonl"
    writer = JsonlWriter(path, first_step=0)
    writer.write(0, {"reward/mean": 0.25})
    assert read_jsonl(path) == [{"step": 0, "reward/mean": 0.25}]
    writer.close()


def test_resuming_drops_the_steps_that_run_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    writer = JsonlWriter(path, first_step=0)
    for step in range(5):
        writer.write(step, {"reward/mean": step / 10})
    writer.close()
    resumed = JsonlWriter(path, first_step=3)
    assert _steps(path) == [0, 1, 2]
    resumed.write(3, {"reward/mean": 0.9})
    resumed.close()
    assert read_jsonl(path)[-1] == {"step": 3, "reward/mean": 0.9}
    assert _steps(path) == [0, 1, 2, 3]


def test_a_line_torn_by_a_kill_is_dropped_and_not_glued_to_the_next(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0, "reward/mean": 1.0}\n{"step": 1, "rew')
    assert _steps(path) == [0]
    writer = JsonlWriter(path, first_step=1)
    writer.write(1, {"reward/mean": 2.0})
    writer.close()
    assert _steps(path) == [0, 1]


GOOD = b'{"step": 0, "text": "\xc3\xa4"}\n'


@pytest.mark.parametrize(
    "tail",
    [
        b"\0" * 100,
        b"\0" * 100 + b'ean": 1.0}\n',
        b'{"step": 1, "text": "\xc3',
        b'{"step": 1, "text": "\xc3"}\n[1]\n',
        GOOD.replace(b"0", b"2") + b"\0\n",
    ],
)
def test_what_a_power_cut_tore_is_cut_off(tmp_path, tail):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(GOOD + tail)
    assert [row["step"] for row in read_jsonl(path) if row["step"] < 2] == [0]
    writer = JsonlWriter(path, first_step=1)
    writer.write(1, {})
    writer.sync()
    writer.close()
    assert path.read_bytes() == GOOD + b'{"step": 1}\n'


def test_what_is_torn_before_steps_that_run_again_does_not_matter(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(GOOD + b"\0\0\n" + b'{"step": 1}\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl:2: expected"):
        JsonlWriter(path, first_step=2)
    JsonlWriter(path, first_step=1).close()
    assert path.read_bytes() == GOOD


@pytest.mark.parametrize("line", ["not json", "[1]", '{"reward/mean": 1}'])
def test_a_broken_line_in_the_middle_is_an_error_with_its_place(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 0}}\n{line}\n{{"step": 2}}\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl:2: expected"):
        read_jsonl(path)


def test_what_is_not_finite_becomes_null(tmp_path):
    path = tmp_path / "metrics.jsonl"
    writer = JsonlWriter(path, first_step=0)
    nested = {"logprobs": [-0.5, -math.inf], "parts": {"format": math.nan, "n": 1}}
    writer.write(0, {"policy/grad_norm": math.nan, "policy/ratio_max": math.inf, **nested})
    writer.close()
    line = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} in JSON"))
    assert line == {
        "step": 0,
        "policy/grad_norm": None,
        "policy/ratio_max": None,
        "logprobs": [-0.5, None],
        "parts": {"format": None, "n": 1},
    }


def test_a_full_disk_says_so(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.symlink_to("/dev/full")
    writer = JsonlWriter(path, first_step=0)
    with pytest.raises(OSError, match=r"disk that holds .*metrics.jsonl is full") as caught:
        writer.write(0, {"reward/mean": 1.0})
    assert caught.value.errno == errno.ENOSPC
    writer.close()
