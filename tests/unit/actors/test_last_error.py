"""The error that counts is found in logs that real processes left (``logs/``)."""

from pathlib import Path

import pytest

from rltrain.actors.last_error import last_error, last_line, strip_ray_frames
from rltrain.config.redact import strip_terminal_codes

LOGS = Path(__file__).parent / "logs"
START = "Traceback (most recent call last):\n"
FRAME = '  File "/venv/lib/python3.11/site-packages/vllm/a.py", line 3, in load\n    load()\n'
SEGFAULT = """*** SIGSEGV received at time=1795981194 on cpu 1 ***
PC: @     0x7f5155785ad8  (unknown)  (unknown)
[2026-11-29 19:39:54,606 E 9787 9787] logging.cc:474: *** SIGSEGV received at time=1795981194 ***
Fatal Python error: Segmentation fault

Stack (most recent call first):
  File "/root/lib/python3.11/ctypes/__init__.py", line 519 in string_at
  File "/work/small.py", line 16 in segv

Extension modules: msgpack._cmsgpack (total: 16)
"""
REMOTE = (
    "ray.exceptions.RayTaskError(KeyError): \x1b[36mray::A.key()\x1b[39m (pid=10043)\n"
    "           ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^\n"
    '  File "/venv/lib/python3.11/site-packages/ray/_private/worker.py", line 9, in get\n'
    "    return fetch()\n"
    "           ^^^^^^^\n"
    '  File "/work/small.py", line 20, in key\n'
    '    raise KeyError("who")\n'
    "    ^^^^^^^^^^^^^^^^^^^^^\n"
    "KeyError: 'who'"
)


def read(name: str) -> str:
    return (LOGS / f"{name}.txt").read_text()


@pytest.mark.parametrize(
    ("name", "text", "where"),
    [
        (
            "engine-start",
            "ValueError: No available memory for the cache blocks.",
            "vllm/v1/core/kv_cache_utils.py:879 in _check_enough_kv_cache_memory",
        ),
        (
            "engine-step",  # the parent's EngineDeadError stands behind it, between its lines
            "RuntimeError: Unsupported CPU attention configuration: head_dim=16 isa=2 "
            "kv_cache_idx=0",
            "torch/_ops.py:1279 in __call__",
        ),
        ("engine-segfault", "Segfault encountered", ""),
    ],
)
def test_the_engines_own_error_is_found(name: str, text: str, where: str) -> None:
    error = last_error(read(name))
    assert error is not None
    assert error.text.startswith(text) and error.where == where
    if name == "engine-step":
        assert error.text == text


def test_a_killed_engine_left_none() -> None:
    """What its parent says of it is no error of its own."""
    assert "EngineDeadError" in read("engine-killed")
    assert last_error(read("engine-killed")) is None
    assert last_error("") is None


def test_what_follows_from_another_process_does_not_count() -> None:
    worker = (
        f"(Worker_TP1 pid=7) {START}(Worker_TP1 pid=7) torch.OutOfMemoryError: CUDA out of memory\n"
    )
    core = (
        f"(EngineCore pid=5) {START}(EngineCore pid=5) Exception: WorkerProc initialization failed "
        "due to an exception in a background process. See stack trace for root cause.\n"
    )
    error = last_error(worker + core)
    assert error is not None and error.text == "torch.OutOfMemoryError: CUDA out of memory"


def test_a_cause_and_lines_that_go_on() -> None:
    first = f"{START}{FRAME}FileNotFoundError: no such folder\n"
    then = "\nDuring handling of the above exception, another exception occurred:\n\n"
    second = (
        f"{START}{FRAME}ImportError: cannot load\n  the library\n2026-11-29 19:45:40 INFO ends\n"
    )
    error = last_error(first + then + second)
    assert error is not None
    assert error.text == (
        "ImportError: cannot load the library (after FileNotFoundError: no such folder)"
    )
    assert str(error).endswith("(at vllm/a.py:3 in load)")


def test_the_end_of_a_process_by_a_signal_is_its_last_error() -> None:
    handled = f"{START}{FRAME}KeyError: 'handled'\n"
    error = last_error(handled + SEGFAULT)
    assert error is not None
    assert error.text == "Fatal Python error: Segmentation fault"
    assert error.where == "ctypes/__init__.py:519 in string_at"
    thrown = (
        "terminate called after throwing an instance of 'std::bad_alloc'\n  what():  no memory\n"
    )
    assert str(last_error(thrown)) == f"{thrown.splitlines()[0]} what():  no memory"


def test_an_error_far_from_the_end_was_not_the_end() -> None:
    log = f"{START}{FRAME}KeyError: 'handled'\n" + "step\n" * 40
    assert last_error(log, within=30) is None
    assert last_error(log, within=40) is not None
    assert last_error(log) is not None


def test_terminal_codes_and_rays_frames_go() -> None:
    assert (
        strip_terminal_codes("\x1b[1;31mred\x1b[0m \x1b]8;;x\x07link\r\n 10%\r 90%")
        == "red link\n 90%"
    )
    assert strip_ray_frames(REMOTE).splitlines() == [
        "ray.exceptions.RayTaskError(KeyError): ray::A.key() (pid=10043)",
        '  File "/work/small.py", line 20, in key',
        '    raise KeyError("who")',
        "    ^^^^^^^^^^^^^^^^^^^^^",
        "KeyError: 'who'",
    ]
    assert last_line(":job_id:01000000\nloading\n(EngineCore pid=5) \n") == "loading"


def test_the_last_of_several_errors_counts() -> None:
    log = f"{START}{FRAME}KeyError: 'handled'\n\n{START}{FRAME}ValueError: the end\n"
    error = last_error(log)
    assert error is not None and error.text == "ValueError: the end"
