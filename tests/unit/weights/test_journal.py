"""A folder that appears whole or not at all, and what is left where that was interrupted."""

import hashlib
import json
from pathlib import Path

import pytest

from rltrain.weights import manifest
from rltrain.weights.journal import Journal

SOURCE = {"source": [1, 2], "size": 3}
LARGE = bytes(range(256)) * 2048  # hashed by the other thread


def write(journal: Journal, name: str, content: bytes) -> None:
    with journal.part(name) as part:
        assert part.write(content[:5]) == 5
        part.write(memoryview(content)[5:])
        part.notes.append(["a", (1, 2)])


def test_parts_are_hashed_and_the_folder_appears_at_the_end(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with Journal(out, SOURCE) as journal:
        write(journal, "policy/a", LARGE)
        write(journal, "b", b"small part")
        assert not out.exists()
        [line] = (out.parent / ".out.partial" / "journal.jsonl").read_bytes().splitlines()[1:2]
        (journal.folder / "config.json").write_text("{}")
        journal.finish(with_manifest=True)
    assert json.loads(line) == {
        "name": "policy/a",
        "entry": {"bytes": len(LARGE), "sha256": hashlib.sha256(LARGE).hexdigest()},
        "notes": [["a", [1, 2]]],
    }
    assert (out / "policy" / "a").read_bytes() == LARGE
    assert sorted(json.loads((out / "manifest.json").read_text())) == [
        "b",
        "config.json",
        "policy/a",
    ]
    manifest.check(out)
    assert not list(tmp_path.glob(".*"))
    with pytest.raises(ValueError, match=r"out exists already"):
        Journal(out, SOURCE)


def test_what_is_unfinished_does_not_count(tmp_path: Path) -> None:
    with Journal(tmp_path / "out", SOURCE) as journal:
        write(journal, "a", b"the first part")
        with pytest.raises(ZeroDivisionError), journal.part("b") as part:
            part.write(b"half")
            raise ZeroDivisionError
    with Journal(tmp_path / "out", SOURCE) as journal:
        assert [part["name"] for part in journal.parts] == ["a"]
        assert journal.parts[0]["notes"] == [["a", [1, 2]]]
        with pytest.raises(ValueError, match="another process is writing it"):
            Journal(tmp_path / "out", SOURCE)


def test_nothing_is_gone_on_with_that_is_not_the_same(tmp_path: Path) -> None:
    out, folder = tmp_path / "out", tmp_path / ".out.partial"
    with Journal(out, SOURCE) as journal:
        write(journal, "a", b"the first part")
    with pytest.raises(ValueError, match="was begun with other size: go on with the same"):
        Journal(out, {**SOURCE, "size": 4})
    (folder / "a").write_bytes(b"the First part")
    with pytest.raises(ValueError, match="a is not what was written"):
        Journal(out, SOURCE)
    # Without a journal nobody knows what the files are: it starts anew.
    (folder / "journal.jsonl").unlink()
    with Journal(out, SOURCE) as journal:
        assert journal.parts == [] and not (folder / "a").exists()
