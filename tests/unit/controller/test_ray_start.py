"""The message about a failed start of Ray: the likely cause and what to do."""

import socket

import pytest

from rltrain.controller.cluster.ray_start import HostState, check_address, start_failure
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
