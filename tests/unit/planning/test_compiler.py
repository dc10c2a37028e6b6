"""What is said of machines that cannot compile, with stand-ins for what they lack."""

from pathlib import Path

import pytest

from rltrain.planning import compiler
from rltrain.planning.compiler import check_compiler, compiler_problem


def script(folder: Path, text: str) -> dict[str, str]:
    """An environment whose compiler is this shell script."""
    file = folder / "cxx"
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)
    return {"CXX": str(file)}


def test_this_machine_compiles() -> None:
    assert compiler_problem({}) == ""
    check_compiler({})


def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert compiler_problem({"CXX": "no-such-compiler"}) == "there is no no-such-compiler"
    said = compiler_problem(script(tmp_path, "echo 'omp.h: No such file' >&2; exit 1"))
    assert said == f"{tmp_path / 'cxx'} says: omp.h: No such file"
    monkeypatch.setattr(compiler.sysconfig, "get_path", lambda name: str(tmp_path))
    assert compiler_problem({}) == f"the headers of Python are not in {tmp_path}"
    with pytest.raises(
        ValueError, match=r"headers of Python are not in .*g\+\+ python3-dev.*RL4015"
    ):
        check_compiler({})


def test_a_compiler_that_hangs_ends_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "LIMIT_S", 0.3)
    assert "does not run" in compiler_problem(script(tmp_path, "exec sleep 30"))
