"""The message about a failed start of Ray: the likely cause and what to do."""

import socket
from pathlib import Path

import pytest

from rltrain.controller.cluster.ray_start import (
    MOST_BROKEN,
    HostState,
    Tries,
    check_address,
    last_words,
    start_failure,
)
from rltrain.planning.memory_terms import GIB

FINE = HostState(2, 14.2, "/tmp", 50 * GIB, 8 * GIB)
# As Ray 2.60 words them.
TIMED_OUT = (
    "The current node timed out during startup. This could happen because some of the raylet "
    "failed to startup or the GCS has become overloaded."
)
SOCKETS = "validate_socket_filename failed: AF_UNIX path length cannot exceed 107 bytes: /tmp/x"
VERSIONS = "Version mismatch: The cluster was started with:\n    Ray: 2.50.0\n    Python: 3.11.7\n"


@pytest.mark.parametrize(
    ("said", "address", "machine", "answer"),
    [
        (
            TIMED_OUT,
            None,
            FINE,
            "slow or busy (2 cores, 14 processes want one): end other programs",
        ),
        (TIMED_OUT, None, FINE._replace(free_temporary=0), "/tmp has 0.00 GiB free"),
        (TIMED_OUT, None, FINE._replace(free_shared=2**26), "docker run --shm-size=8g"),
        ("[Errno 28] No space left on device", None, FINE, "free some space there"),
        ("[Errno 13] Permission denied: '/tmp/ray'", None, FINE, "set RAY_TMPDIR to a folder of"),
        (SOCKETS, None, FINE._replace(temporary="/long"), "/long is too long for Ray: set RAY_T"),
        (VERSIONS, "auto", FINE, "Install the cluster's versions of Ray and Python here"),
        ("Could not find any running Ray instance.", "auto", FINE, "ray status --address=auto"),
    ],
)
def test_each_cause_has_its_remedy(
    said: str, address: str | None, machine: HostState, answer: str
) -> None:
    message = str(start_failure(Exception(f"\x1b[31m{said}\x1b[0m"), address, machine))
    assert " ".join(said.split()) in message and answer in message
    assert "\x1b" not in message
    begin = "Ray did not start: " if address is None else f"cluster.address={address}: "
    assert message.startswith(begin)


def test_a_token_that_is_missing_is_named_though_ray_hides_it() -> None:
    try:
        raise ConnectionError("Failed to connect to Ray cluster at h:1") from RuntimeError(
            "Last connection error: ray.exceptions.AuthenticationError: RPC error: InvalidAuthToken"
        )
    except ConnectionError as error:
        message = str(start_failure(error, "h:1", FINE))
    assert "copy ~/.ray/auth_token of the machine" in message and message.endswith("[RL4004]")


@pytest.mark.parametrize(
    ("address", "answer"),
    [
        ("ray://10.0.0.1:10001", "start the run on a node"),
        ("somewhere", "expected HOST:PORT"),
        ("127.0.0.1:99999999", "nobody answers there"),
        ("no-such-host.invalid:6379", "nobody answers there"),
    ],
)
def test_an_address_that_nobody_can_join_is_refused(address: str, answer: str) -> None:
    with pytest.raises(RuntimeError) as refused:
        check_address(address)
    assert str(refused.value).startswith(f"cluster.address={address}: ")
    assert answer in str(refused.value)


def test_one_where_somebody_listens_is_not() -> None:
    """Until nobody does."""
    check_address("auto")
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        check_address(address)
    with pytest.raises(RuntimeError, match="nobody answers there"):
        check_address(address)


def test_a_slow_start_is_tried_again_for_as_long_as_there_is_time() -> None:
    tries, now = Tries(timeout_s=200.0, began=0.0), 0.0
    while tries.again(Exception(TIMED_OUT), FINE, False, now := now + 32.0):
        now += tries.pause_s
        assert now < 200.0
    assert 4 <= tries.count <= 6 and tries.tried(now) == f"tried {tries.count} times in {now:.0f} s"


def test_what_time_does_not_mend_is_not_tried_again() -> None:
    for said, machine in [(SOCKETS, FINE), (TIMED_OUT, FINE._replace(free_shared=0))]:
        assert not Tries(200.0, 0.0).again(Exception(said), machine, False, 1.0)
    tries = Tries(1000.0, 0.0)
    again = [tries.again(Exception(TIMED_OUT), FINE, True, 30.0) for _ in range(MOST_BROKEN)]
    assert again == [True] * (MOST_BROKEN - 1) + [False]


def test_the_failure_says_how_often_and_where_the_logs_are(tmp_path: Path) -> None:
    said = "Failed to start GCS.  Last 2 lines of error files:\n" + "raw line\n" * 25
    logs = tmp_path / "session_2026-11-30" / "logs"
    logs.mkdir(parents=True)
    assert last_words(tmp_path) == "Ray wrote nothing"
    (logs / "gcs_server.err").write_text("first\nit is full\n\n")
    words = last_words(tmp_path)
    message = str(start_failure(Exception(said), None, FINE, "tried 3 times in 95 s", words))
    assert message.startswith("Ray did not start (tried 3 times in 95 s): Failed to start GCS.")
    assert "raw line" not in message and message.count("\n") == 1
    assert "raise cluster.start_timeout_s" in message
    assert message.endswith("Logs: gcs_server: it is full [RL4003]")
