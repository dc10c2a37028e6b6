"""Logs of another node, piece by piece."""

from collections import Counter
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from rltrain.actors import log_pieces
from rltrain.actors.log_pieces import append_piece, read_pieces

WRITES = st.lists(st.tuples(st.sampled_from(["policy-0.log", "engine-1.log"]), st.binary()))


@given(WRITES, st.integers(1, 9))
def test_every_byte_arrives_once_and_in_order(tmp_path_factory, writes, piece) -> None:
    """However the writes fall between two beats, and below what an earlier start left."""
    there, here = (tmp_path_factory.mktemp(name) for name in ("there", "here"))
    (here / "policy-0.log").write_bytes(b"earlier\n")
    expected, at = {"policy-0.log": b"earlier\n"}, Counter[str]()

    def beat() -> int:
        left = 0
        for one in read_pieces(there, at):
            append_piece(here, one)
            at[one.name] += len(one.data)
            left += one.left
        return left

    before, log_pieces.PIECE = log_pieces.PIECE, piece
    try:
        for name, data in writes:
            with (there / name).open("ab") as file:
                file.write(data)
            expected[name] = expected.get(name, b"") + data
            beat()
        while beat():
            pass
    finally:
        log_pieces.PIECE = before
    found = {file.name: file.read_bytes() for file in here.iterdir()}
    assert found == {name: data for name, data in expected.items() if data}


def test_a_node_without_logs_sends_nothing(tmp_path: Path) -> None:
    assert read_pieces(tmp_path / "nothing", {}) == []
    (tmp_path / "other.txt").write_text("x")
    assert read_pieces(tmp_path, {}) == []
