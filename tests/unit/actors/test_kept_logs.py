"""No secret stays in the logs of a run, and nothing else of them is lost."""

import errno
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rltrain.actors.kept_logs import MOST_SESSIONS, TAIL, Sweep, copy_ray_logs, redact_logs
from rltrain.config.redact import Redactor

SECRET = "correct-horse-battery"
REDACTOR = Redactor({"SOME_TOKEN": SECRET})


def test_known_names_and_shapes_go_at_the_end_and_crash_output_stays(tmp_path: Path) -> None:
    log = tmp_path / "engine-0.log"
    log.write_bytes(
        f"=== process 7 starts, now ===\nx {SECRET} y\napi_key=abcdefgh1234\n"
        "Authorization: Bearer abcdefgh12345\n".encode()
        + b"\xff\xfe not text\nFatal Python error: Segmentation fault"
    )
    other = tmp_path / "policy-0.log"
    other.write_text("ready\n")
    before = other.stat()
    redact_logs(tmp_path, REDACTOR)
    text = log.read_bytes()
    for secret in (SECRET, "abcdefgh1234"):
        assert secret.encode() not in text
    assert text.startswith(b"=== process 7 starts, now ===\nx [redacted] y\n")
    assert text.endswith(b"\xff\xfe not text\nFatal Python error: Segmentation fault")
    assert other.stat().st_ino == before.st_ino
    assert sorted(file.name for file in tmp_path.iterdir()) == ["engine-0.log", "policy-0.log"]


@pytest.mark.parametrize("secret", [SECRET, "abc"], ids=["longer", "shorter"])
def test_on_a_full_disk_no_secret_stays_either(
    secret: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*paths: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    log = tmp_path / "engine-0.log"
    log.write_text(f"x {secret} y\n" + "z" * 40)
    size = log.stat().st_size
    redact_logs(tmp_path, Redactor({"SOME_TOKEN": secret, "OTHER_TOKEN": SECRET}))
    assert [file.name for file in tmp_path.iterdir()] == ["engine-0.log"]
    assert SECRET not in log.read_text() and log.stat().st_size <= size
    if secret == SECRET:
        assert log.read_text() == "x [redacted] y\n" + "z" * 40


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(parts=st.lists(st.sampled_from([SECRET, SECRET[:5], SECRET[5:], "é", "\n", "x" * 40])))
def test_a_sweep_masks_what_was_written_since(parts: list[str], tmp_path: Path) -> None:
    log, all_of_it = tmp_path / "policy-0.log", "".join(parts).encode()
    log.write_bytes(b"")
    sweep = Sweep(tmp_path)
    with log.open("ab", buffering=0) as writer:
        for part in parts:
            writer.write(part.encode())
            sweep.sweep(REDACTOR)
    found = log.read_bytes()
    assert SECRET.encode() not in found
    assert found == all_of_it.replace(SECRET.encode(), b"*" * len(SECRET))


def test_long_logs_are_swept_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rltrain.actors.kept_logs.BLOCK", 64)
    text = ("a" * 50 + SECRET) * 20
    (tmp_path / "policy-0.log").write_text(text)
    (tmp_path / "reward-0.log").write_text(SECRET)
    Sweep(tmp_path).sweep(REDACTOR)
    masked = text.replace(SECRET, "*" * len(SECRET))
    assert (tmp_path / "policy-0.log").read_text() == masked
    assert (tmp_path / "reward-0.log").read_text() == SECRET  # its writer cuts it; see redact_logs
    redact_logs(tmp_path, REDACTOR)
    assert (tmp_path / "reward-0.log").read_text() == "[redacted]"


def test_the_ends_of_rays_logs_are_copied_without_secrets(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "ray-logs").symlink_to(tmp_path / "gone")  # of an older version
    for number in range(MOST_SESSIONS + 2):
        logs = tmp_path / "r" / f"session_2026-11-3{number}" / "logs"
        logs.mkdir(parents=True)
        (logs / "gcs_server.err").write_text("x" * TAIL + f"\nit died {SECRET}\n")
        (logs / "raylet.err").touch()
        (logs / "runtime_env_agent.log").write_text("of no use")
    os.symlink("session_2026-11-30", tmp_path / "r" / "session_latest")
    copy_ray_logs(tmp_path / "r", run, REDACTOR)
    copied = sorted(file.relative_to(run) for file in run.rglob("*") if file.is_file())
    assert len(copied) == MOST_SESSIONS and {file.name for file in copied} == {"gcs_server.err"}
    text = (run / copied[-1]).read_text()
    assert text.endswith("it died [redacted]\n") and len(text) <= TAIL
    assert copied[-1].parts[1] == "session_2026-11-36"
