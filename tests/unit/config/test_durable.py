"""A file is whole on the disk or not there, whenever the power is cut."""

import errno
import os
from pathlib import Path

import pytest

from rltrain.config.durable import sync_all, write_durably


def test_the_content_is_flushed_before_the_name_and_the_folder_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    fsync, replace = os.fsync, os.replace

    def flush(file: int) -> None:
        done.append(f"flush {os.path.basename(os.readlink(f'/proc/self/fd/{file}'))}")
        fsync(file)

    def rename(source: Path, target: Path) -> None:
        done.append(f"rename {source.name} {target.name}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", flush)
    monkeypatch.setattr(os, "replace", rename)
    write_durably(tmp_path / "state.json", "1")
    partial = ".state.json.partial"
    assert done == [f"flush {partial}", f"rename {partial} state.json", f"flush {tmp_path.name}"]


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.ENOSPC, r"disk that holds .*state.json is full: free some space.*\[RL6005\]"),
        (errno.EDQUOT, r"disk that holds .*state.json is full"),
        (errno.EIO, r"state.json cannot be written \(Input/output error\).*\[RL6001\]"),
    ],
)
def test_what_cannot_be_written_leaves_the_old_file_alone(
    number: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "state.json"
    write_durably(path, b"old")

    def fail(_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match=said) as caught:
        write_durably(path, b"new")
    assert caught.value.errno == number
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_a_file_system_that_cannot_flush_folders_will_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync = os.fsync

    def flush(file: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{file}"):
            raise OSError(errno.EINVAL, "Invalid argument")
        fsync(file)

    monkeypatch.setattr(os, "fsync", flush)
    write_durably(tmp_path / "a", "1")
    (tmp_path / "link").symlink_to("nowhere")
    sync_all(tmp_path)
    assert (tmp_path / "a").read_text() == "1"
