"""Tensors from one process to another: exact, bounded and checked.

The transport "ipc" needs a GPU; what it shares with "broadcast" is tested here.
"""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from rltrain.parallel.rendezvous import LOOPBACK, Member, Rendezvous, RendezvousFailed, serve
from rltrain.weights.sync.broadcast import BroadcastGroup, BroadcastSender
from rltrain.weights.sync.flat_buffers import FlatSlots, buffer_checksum, unpack_bucket
from rltrain.weights.sync.links import BroadcastReceiver
from rltrain.weights.sync.stream import (
    Bucket,
    BucketSender,
    BucketStream,
    merge_buckets,
    tensor_entry,
)
from tests.unit.weights.held import HeldSender

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.uint8, torch.bool]
CPU = torch.device("cpu")
Received = list[tuple[str, torch.Tensor]]


def some_tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    tensors = {f"of.{dtype}": (torch.randn(3, 5) * 9).to(dtype) for dtype in DTYPES}
    tensors |= {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 4), "big": torch.randn(900)}
    return tensors | {
        "transposed": torch.randn(4, 6).t(),
        "odd": torch.arange(7, dtype=torch.uint8),
    }


@pytest.fixture(scope="module")
def groups() -> list[BroadcastGroup]:
    """Sender and receiver; each of them is made in a thread, for they wait for one another."""
    at = Rendezvous.local(2)
    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(lambda rank: BroadcastGroup(at, rank, CPU, 60.0, 60.0), range(2)))


def transfer(
    sender: BucketSender,
    read: Callable[[Bucket], Received],
    tensors: dict[str, torch.Tensor],
    bucket_bytes: int,
) -> list[list[str]]:
    """Send and check ``tensors`` as the controller does; return the names by bucket."""
    names = []
    stream = BucketStream(iter(tensors.items()), sender, bucket_bytes)
    bucket = stream.next_bucket()
    with ThreadPoolExecutor(1) as threads:
        while bucket is not None:
            reading = threads.submit(read, json.loads(json.dumps(bucket)))
            following = stream.next_bucket()
            received = dict(reading.result())
            for name, tensor in received.items():
                assert tensor.dtype == tensors[name].dtype and tensor.shape == tensors[name].shape
                raw = [x.contiguous().view(-1).view(torch.uint8) for x in (tensor, tensors[name])]
                assert torch.equal(*raw)
            names.append(list(received))
            assert bucket["index"] == len(names) - 1
            assert bucket["last"] == (sum(map(len, names)) == len(tensors))
            bucket = following
    stream.close()
    return names


@pytest.mark.parametrize("bucket_bytes", [16, 112, 1008, 2**20])
def test_every_tensor_arrives_once_in_order(
    bucket_bytes: int, groups: list[BroadcastGroup]
) -> None:
    tensors = some_tensors()
    sender = BroadcastSender(groups[0], CPU, bucket_bytes)
    read = BroadcastReceiver({0: groups[1]}, CPU).read
    buckets = transfer(sender, read, tensors, bucket_bytes)
    assert [name for names in buckets for name in names] == list(tensors)
    for names in buckets:
        sizes = [tensors[name].nbytes for name in names if tensors[name].nbytes]
        assert len(sizes) <= 1 or sum(sizes) <= bucket_bytes


def test_a_bucket_is_there_until_the_next_but_one() -> None:
    tensors = {f"{i}": torch.full((4,), i) for i in range(3)}
    sender = HeldSender(32)
    stream = BucketStream(iter(tensors.items()), sender, 32)
    first, second = stream.next_bucket(), stream.next_bucket()
    assert first is not None and second is not None
    assert torch.equal(dict(sender.read(first))["0"], tensors["0"])
    assert stream.next_bucket() is not None
    with pytest.raises(ValueError, match="bucket 0 arrived changed"):
        sender.read(first)
    assert torch.equal(dict(sender.read(second))["1"], tensors["1"])
    assert stream.next_bucket() is None


def test_what_lies_between_tensors_is_the_same_for_every_sender() -> None:
    """They make the checksum of it, too, whatever was in the slot before."""
    slots, tensors = FlatSlots(CPU, 2**12), dict(some_tensors())
    _, nbytes = slots.fill(0, iter(tensors.items()))
    expected = buffer_checksum(slots.buffers[0][:nbytes])
    slots.buffers[0].fill_(255)
    assert slots.fill(0, iter(tensors.items()))[1] == nbytes
    assert buffer_checksum(slots.buffers[0][:nbytes]) == expected


def test_ranks_that_only_take_part_cut_at_the_same_places() -> None:
    taken: dict[bool, list[int]] = {True: [], False: []}

    def stream(sends: bool) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in some_tensors().items():
            taken[sends][-1] += 1
            yield name, tensor

    for sends, counts in taken.items():
        counts.append(0)
        buckets = BucketStream(stream(sends), HeldSender(200) if sends else None, 200)
        for _ in range(9):
            counts.append(0)
            assert (buckets.next_bucket() is not None) <= sends
        buckets.close()
    assert taken[True] == taken[False]
    assert sum(map(bool, taken[True])) > 4


def test_a_changed_byte_is_found() -> None:
    slots = FlatSlots(CPU, 2**12)
    tensors = dict(list(some_tensors().items())[:6])
    entries, nbytes = slots.fill(0, iter(tensors.items()))
    buffer = slots.buffers[0][:nbytes]
    bucket = Bucket(
        transport="broadcast",
        stage=0,
        stages=1,
        index=3,
        last=True,
        tensors=entries,
        payload={"checksum": buffer_checksum(buffer)},
    )
    assert [name for name, _ in unpack_bucket(buffer, bucket)] == list(tensors)
    buffer[nbytes - 20] ^= 1
    with pytest.raises(ValueError, match=rf"bucket 3 arrived changed: expected {nbytes} bytes"):
        unpack_bucket(buffer, bucket)


def test_senders_that_disagree_are_refused() -> None:
    def bucket(gpu: str, of: int) -> Bucket:
        payload: dict[str, Any] = {"checksum": of, "handles": {gpu: [gpu]}}
        return Bucket(
            transport="ipc", stage=0, stages=1, index=2, last=False, tensors=[], payload=payload
        )

    assert merge_buckets([bucket("a", 5), bucket("b", 5)])["payload"]["handles"] == {
        "a": ["a"],
        "b": ["b"],
    }
    other = bucket("b", 5)
    entry = tensor_entry("t", torch.zeros(2), 0)
    for unlike in bucket("b", 6), {**other, "last": True}, {**other, "tensors": [entry]}:
        with pytest.raises(ValueError, match="other ones in bucket 2 of sender 1 than in that of"):
            merge_buckets([bucket("a", 5), unlike])  # type: ignore[list-item]


def test_a_member_that_does_not_join_is_named() -> None:
    members = [Member("policy rank 2", "10.77.0.2"), Member("engine 1, worker 0,", "10.77.0.3")]
    with pytest.raises(RendezvousFailed, match=r"engine 1, worker 0, on node 10\.77\.0\.3"):
        BroadcastGroup(Rendezvous.at(serve(LOOPBACK), members), 0, CPU, 0.5, 60.0)


def test_an_empty_stream_is_refused() -> None:
    with pytest.raises(ValueError, match="no tensor"):
        BucketStream(iter([]), None, 2**20)
