"""A log keeps its newest lines, never grows beyond its limit, and says what is missing."""

import re

from hypothesis import given
from hypothesis import strategies as st

from rltrain.environments.capped_log import CappedLog

LIMIT = 1000
NOTE = re.compile(rb"\A=== (\d+) bytes before this line were cut: data.reward.limits.log_mib ===\n")
LINES = st.lists(st.integers(1, 700).map(lambda n: b"x" * n + b"\n"), min_size=1, max_size=9)


@given(before=LINES, after=LINES)
def test_what_is_kept_is_the_end_of_what_was_written(tmp_path_factory, before, after) -> None:
    path, written = tmp_path_factory.mktemp("log") / "reward-0.log", b""
    for pieces in (before, after):  # by a worker, and by the one that replaces it
        log = CappedLog(path, LIMIT)
        if pieces is after and NOTE.search(path.read_bytes()):
            written = path.read_bytes()
        for piece in pieces:
            log.write(piece)
            written += piece
            found = path.read_bytes()
            assert len(found) <= LIMIT
            note = NOTE.search(found)
            rest = found[note.end() :] if note and found != written else found
            assert written.endswith(rest)
            if rest != found:
                assert note is not None and int(note[1]) + len(rest) == len(written)
            else:
                assert found == written


def test_without_a_limit_all_is_kept(tmp_path) -> None:
    log = CappedLog(tmp_path / "reward-0.log", None)
    for _ in range(100):
        log.write(b"x" * 1000)
    assert (tmp_path / "reward-0.log").stat().st_size == 100_000
