"""A storage that does not answer is an error in time, and the process can end."""

import threading
import time

import pytest
from fsspec.implementations.local import LocalFileSystem

from rltrain.weights.huggingface import remote_folder
from rltrain.weights.huggingface.remote_folder import RemoteFolder


@pytest.mark.parametrize(
    ("method", "call", "what"),
    [
        ("find", lambda folder, file: folder.sizes(), "list"),
        ("cat_file", lambda folder, file: folder.read("a"), "read"),
        ("pipe_file", lambda folder, file: folder.write("a", b"1"), "write"),
        ("put_file", lambda folder, file: folder.put({"a": file, "b": file, "c": file}), "write"),
        ("get_file", lambda folder, file: folder.get({"a": file, "b": file}), "read"),
    ],
)
def test_every_call_has_a_limit(tmp_path, monkeypatch, method, call, what):
    folder, file, answer = RemoteFolder(f"file://{tmp_path}/run"), tmp_path / "a", threading.Event()
    file.write_text("1")
    monkeypatch.setattr(remote_folder, "ANSWER_S", 0.3)
    monkeypatch.setattr(LocalFileSystem, method, lambda *args, **more: answer.wait(60.0))
    began = time.monotonic()
    with pytest.raises(
        RuntimeError, match=rf"cannot {what} there: .* did not answer in time.*RL6012"
    ):
        call(folder, file)
    assert time.monotonic() - began < 10
    answer.set()


def test_the_time_for_files_grows_with_their_size(tmp_path, monkeypatch):
    file, put = tmp_path / "a", LocalFileSystem.put_file
    file.write_bytes(bytes(remote_folder.SLOWEST))

    def slowly(*args, **more):
        time.sleep(0.4)
        return put(*args, **more)

    monkeypatch.setattr(remote_folder, "ANSWER_S", 0.3)
    monkeypatch.setattr(LocalFileSystem, "put_file", slowly)
    folder = RemoteFolder(f"file://{tmp_path}/run")
    folder.put({"a": file})
    assert folder.sizes() == {"a": remote_folder.SLOWEST}
