"""From where an export fetches files: what was typed, and not what a manifest names."""

import json
from pathlib import Path

import pytest

from rltrain.cli.export_places import check_places, readable_run, with_weights
from rltrain.weights.huggingface.manifest import write_manifest

WEIGHTS = "policy/a.distcp"


def checkpoint_in(run: Path, place: str | None) -> Path:
    """A checkpoint of one file, which is at ``place`` if it is not None."""
    folder = run / "checkpoints" / "step_000001"
    (folder / "policy").mkdir(parents=True)
    (folder / "state.json").write_text('{"step": 1}')
    (folder / WEIGHTS).write_bytes(b"weights")
    write_manifest(folder)
    if place is not None:
        (folder / WEIGHTS).unlink()
        entries = json.loads((folder / "manifest.json").read_text())
        entries[WEIGHTS]["place"] = place
        (folder / "manifest.json").write_text(json.dumps(entries))
    return folder


@pytest.fixture
def store(tmp_path: Path) -> str:
    """The URL of a run whose checkpoints are behind it."""
    remote = tmp_path / "store"
    (remote / "step_000001" / "policy").mkdir(parents=True)
    (remote / "config.yaml").write_text("{}")
    (remote / "step_000001" / "state.json").write_text('{"step": 1}')
    (remote / "step_000001" / WEIGHTS).write_bytes(b"weights")
    write_manifest(remote / "step_000001")
    return remote.as_uri()


def test_a_manifest_alone_makes_nothing_be_fetched(tmp_path: Path, store: str) -> None:
    folder = checkpoint_in(tmp_path / "run", f"{store}/step_000001")
    for source in (str(tmp_path / "run"), str(folder)):
        with (
            pytest.raises(ValueError, match=r"its files are in file://.* add --trust \[RL6007\]"),
            with_weights(folder, source, trust=False),
        ):
            pass
    with with_weights(folder, str(folder), trust=True) as found:
        assert (found / WEIGHTS).read_bytes() == b"weights"


@pytest.mark.parametrize("of", ["", "/step_000001"])
def test_what_was_typed_is_fetched(store: str, of: str) -> None:
    with readable_run(store + of) as run:
        folder = run / "checkpoints" / "step_000001" if not of else run
        with with_weights(folder, store + of, trust=False) as found:
            assert (found / WEIGHTS).read_bytes() == b"weights"


@pytest.mark.parametrize(
    ("source", "place"),
    [
        ("s3://mine/run", "s3://yours/run/step_000001"),
        ("s3://mine/run", "s3://mine/running/step_000001"),
        ("s3://mine/run", "s3://mine/run/../other/step_000001"),
        ("s3://mine/run/step_000002", "http://169.254.169.254/latest"),
        ("/run", "file:///etc"),
    ],
)
def test_other_urls_are_refused(source: str, place: str) -> None:
    with pytest.raises(ValueError, match="RL6007"):
        check_places(Path("c"), source, [place])


def test_urls_below_are_not() -> None:
    places = ["s3://mine/run/step_000001", "s3://mine/run"]
    for source in ("s3://mine/run", "s3://mine/run/", "s3://mine/run/step_000001"):
        check_places(Path("c"), source, places)


def test_files_that_are_here_need_no_trust(tmp_path: Path) -> None:
    folder = checkpoint_in(tmp_path, None)
    with with_weights(folder, str(tmp_path), trust=False) as found:
        assert found == folder
