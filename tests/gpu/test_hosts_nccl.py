"""Weights by NCCL over sockets, between two hosts: each on a GPU of its own where there are two.

    python tests/gpu/test_hosts_nccl.py FOLDER [cuda|cpu]       # where there is no pytest

Each host is a network namespace with an address of its own, joined by a pair of veth. Where none
can be made (no root, no iproute2), the two processes stay in one namespace, which the result says.
NCCL believes in two hosts by NCCL_HOSTID, and then takes one GPU for two. Checked: the bytes that
arrive, those that cross the link, and what is said where the interface is wrong. With "cpu" gloo
takes NCCL's place, to try the script itself.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SPACES = ("rl-nccl-0", "rl-nccl-1")
ADDRESSES = ("10.79.0.1", "10.79.0.2")
LOOPBACKS = ("127.0.0.1", "127.0.0.2")
BUCKET_BYTES = 32 * 2**20
NUM_TENSORS, ROWS = 24, 2**21  # 112 MiB in four buckets, so that each slot is filled twice
LIMIT_S = 60.0


def say(text: str) -> None:
    sys.stdout.write(f"[{time.strftime('%H:%M:%S')}] {text}\n")
    sys.stdout.flush()


# A host's process


def tensors(device: Any) -> dict[str, Any]:
    import torch

    torch.manual_seed(1)
    kinds = [torch.bfloat16, torch.float32, torch.uint8]
    return {
        f"tensor {n}": torch.randn(ROWS).mul(9).to(kinds[n % 3]).to(device)
        for n in range(NUM_TENSORS)
    }


def member(rank: int, folder: Path, addresses: tuple[str, str], device_name: str) -> dict[str, Any]:
    """One of two processes of a broadcast group; what it found."""
    import torch

    from rltrain.actors.network import addresses as known
    from rltrain.actors.network import find_interface, set_variables
    from rltrain.parallel.rendezvous import Member, Rendezvous, RendezvousFailed, serve
    from rltrain.weights.sync.broadcast import BroadcastGroup

    name, host = find_interface(addresses[rank], None, known())
    set_variables(name, host)
    file = folder / "meeting.json"
    if rank == 0:
        at = Rendezvous.at(serve(host), [Member(f"rank {n}", addresses[n]) for n in range(2)])
        written = {"store": at.store, "group": at.group, "members": at.members}
        file.with_suffix(".part").write_text(json.dumps(written))
        file.with_suffix(".part").rename(file)
    while not file.exists():
        time.sleep(0.05)
    number = min(rank, torch.cuda.device_count() - 1) if device_name == "cuda" else None
    device, began = torch.device(device_name, number), time.time()
    at = Rendezvous.from_plain(json.loads(file.read_text()))
    try:
        group = BroadcastGroup(at, rank, device, LIMIT_S, LIMIT_S)
    except RendezvousFailed as error:
        return {"error": str(error), "seconds": time.time() - began}
    joined = time.time() - began
    place = {"interface": name, "device": str(device), "join_seconds": joined}
    return place | transfer(rank, folder, group, device)


def transfer(rank: int, folder: Path, group: Any, device: Any) -> dict[str, Any]:
    """The policy's buckets and the engine's end; each bucket's entry goes by a file, as Ray's."""
    import torch

    from rltrain.weights.sync.broadcast import BroadcastSender
    from rltrain.weights.sync.links import BroadcastReceiver
    from rltrain.weights.sync.stream import BucketStream

    whole, began, count = tensors(device), time.time(), 0
    if rank == 0:
        sender = BroadcastSender(group, device, BUCKET_BYTES)
        stream = BucketStream(iter(whole.items()), sender, BUCKET_BYTES)
        while (bucket := stream.next_bucket()) is not None:
            part = folder / f"bucket-{count}.part"
            part.write_text(json.dumps(bucket))
            part.rename(folder / f"bucket-{count}.json")
            count += 1
        stream.close()
        return {"buckets": count, "seconds": time.time() - began}
    receiver, equal, last = BroadcastReceiver({0: group}, device), {}, False
    while not last:
        file = folder / f"bucket-{count}.json"
        while not file.exists():
            time.sleep(0.001)
        bucket = json.loads(file.read_text())
        for name, found in receiver.read(bucket):
            equal[name] = torch.equal(found.view(torch.uint8), whole[name].view(torch.uint8))
        last, count = bucket["last"], count + 1
    nbytes = sum(tensor.nbytes for tensor in whole.values())
    assert equal.keys() == whole.keys()
    return {
        "different": sorted(name for name, same in equal.items() if not same),
        "bytes": nbytes,
        "seconds": time.time() - began,
    }


# The hosts


def make_hosts() -> tuple[tuple[str, str], str]:
    """The addresses of the two hosts, and what they are; see `remove_hosts`."""
    remove_hosts()
    commands = [f"ip netns add {space}" for space in SPACES]
    commands.append(f"ip -n {SPACES[0]} link add eth0 type veth peer name eth0 netns {SPACES[1]}")
    for space, address in zip(SPACES, ADDRESSES, strict=True):
        commands += [
            f"ip -n {space} addr add {address}/24 dev eth0",
            f"ip -n {space} link set eth0 up",
            f"ip -n {space} link set lo up",
        ]
    if shutil.which("ip") is None:
        return LOOPBACKS, "one host, two loopback addresses: iproute2 is missing"
    for command in commands:
        done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
        if done.returncode:
            remove_hosts()
            return LOOPBACKS, f"one host, two loopback addresses: {command}: {done.stderr.strip()}"
    return ADDRESSES, "two network namespaces"


def remove_hosts() -> None:
    for space in SPACES if shutil.which("ip") else ():
        subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)


def on_hosts(folder: Path, addresses: tuple[str, str], device: str, interface: str | None) -> Any:
    """What the two processes found, and the bytes that left the first one's network."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.json"):
        old.unlink()
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "NCCL_DEBUG": "INFO"}
    env |= {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1"}
    if interface is not None:
        env |= {"NCCL_SOCKET_IFNAME": f"={interface}", "GLOO_SOCKET_IFNAME": interface}
    separate = addresses == ADDRESSES
    parts = []
    for rank, space in enumerate(SPACES):
        command = [sys.executable, __file__, str(folder), "--member", str(rank), *addresses, device]
        command = ["ip", "netns", "exec", space, *command] if separate else command
        log = (folder / f"{rank}.log").open("w")
        own = env | {"NCCL_HOSTID": f"host-{rank}"}
        parts.append(subprocess.Popen(command, env=own, stdout=log, stderr=subprocess.STDOUT))
    for part in parts:
        part.wait(3 * LIMIT_S)
    found = [json.loads((folder / f"found-{rank}.json").read_text()) for rank in range(2)]
    if separate:
        show = f"ip netns exec {SPACES[0]} cat /sys/class/net/eth0/statistics/tx_bytes"
        done = subprocess.run(show.split(), capture_output=True, text=True, check=True)
        found[0]["sent_over_link"] = int(done.stdout)
    return found


def run(folder: Path, device: str) -> None:
    """Raises AssertionError: bytes differ, or the error of a wrong interface does not name it."""
    addresses, what = make_hosts()
    result: dict[str, Any] = {"hosts": what, "device": device}
    say(f"{what}; {device}")
    try:
        sent, received = on_hosts(folder / "right", addresses, device, None)
        result |= {"sender": sent, "receiver": received}
        say(json.dumps(result))
        assert received["different"] == [], received
        if addresses == ADDRESSES:
            assert sent["sent_over_link"] > received["bytes"], "the bytes took another way"
            wrong = on_hosts(folder / "wrong", addresses, device, "lo")
            result["wrong interface"] = wrong
            say(json.dumps(wrong))
            for rank, end in enumerate(wrong):
                assert f"rank {rank} on node {addresses[rank]}" in end["error"], end
                assert "SOCKET_IFNAME is " in end["error"] and "[RL4033]" in end["error"], end
                assert end["seconds"] < LIMIT_S + 10, end
    finally:
        (folder / "result.json").write_text(json.dumps(result, indent=2))
        remove_hosts()
    say("all bytes equal")


def main(folder: Path, *arguments: str) -> None:
    if arguments[:1] != ("--member",):
        folder.mkdir(parents=True, exist_ok=True)
        return run(folder, *(arguments or ("cuda",)))
    rank, first, second, device = arguments[1:]
    found = member(int(rank), folder, (first, second), device)
    (folder / f"found-{rank}.json").write_text(json.dumps(found))
    sys.stdout.flush()
    time.sleep(2)  # the other one may still be connected
    os._exit(0)  # a thread may hang in a connection


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute(), *sys.argv[2:])
else:
    import pytest
    import torch

    pytestmark = [
        pytest.mark.gpu,
        pytest.mark.timeout(600),
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    ]

    def test_weights_cross_hosts_by_nccl(tmp_path: Path) -> None:
        run(tmp_path, "cuda")
