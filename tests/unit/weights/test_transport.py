"""Tensors through shared memory: exact, bounded, checked, and gone afterwards."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rltrain.weights.transport import SHARED_MEMORY, Bucket, BucketWriter, read_bucket

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]


def some_tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    tensors = {f"of.{dtype}": (torch.randn(3, 5) * 9).to(dtype) for dtype in DTYPES}
    tensors |= {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 4), "big": torch.randn(900)}
    return tensors | {
        "transposed": torch.randn(4, 6).t(),
        "odd": torch.arange(7, dtype=torch.uint8),
    }


def segments() -> set[str]:
    return {path.name for path in SHARED_MEMORY.glob(f"rltrain-*-{os.getpid()}-*")}


def transfer(tensors: dict[str, torch.Tensor], bucket_bytes: int) -> list[list[str]]:
    """Send and check ``tensors``; return the names by bucket."""
    names = []
    with BucketWriter(iter(tensors.items()), bucket_bytes) as writer:
        while (bucket := writer.next_bucket()) is not None:
            assert len(segments()) == 1
            over_the_wire: Bucket = json.loads(json.dumps(bucket))
            received = dict(read_bucket(over_the_wire))
            for name, tensor in received.items():
                assert tensor.dtype == tensors[name].dtype
                assert torch.equal(tensor, tensors[name])
            names.append(list(received))
            assert bucket["index"] == len(names) - 1
            assert bucket["last"] == (sum(map(len, names)) == len(tensors))
    return names


@pytest.mark.parametrize("bucket_bytes", [1, 100, 1000, 2**20])
def test_every_tensor_arrives_once_in_order(bucket_bytes: int) -> None:
    tensors = some_tensors()
    buckets = transfer(tensors, bucket_bytes)
    assert [name for names in buckets for name in names] == list(tensors)
    for names in buckets:
        sizes = [tensors[name].nbytes for name in names if tensors[name].nbytes]
        assert len(sizes) <= 1 or sum(sizes) <= bucket_bytes
    assert segments() == set()


def test_ranks_that_only_take_part_cut_at_the_same_places() -> None:
    taken: dict[bool, list[int]] = {True: [], False: []}

    def stream(write: bool) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in some_tensors().items():
            taken[write][-1] += 1
            yield name, tensor

    for write, counts in taken.items():
        counts.append(0)
        with BucketWriter(stream(write), 200, write=write) as writer:
            counts.append(0)
            while (bucket := writer.next_bucket()) is not None:
                assert (bucket["segment"] is None) == (bucket["tensors"] == []) == (not write)
                counts.append(0)
    assert taken[True] == taken[False]
    assert len(taken[True]) > 4


def test_a_changed_byte_is_found_and_named() -> None:
    with BucketWriter(iter(some_tensors().items())) as writer:
        bucket = writer.next_bucket()
        assert bucket is not None and bucket["segment"] is not None
        entry = next(e for e in bucket["tensors"] if e["name"] == "big")
        with open(SHARED_MEMORY / bucket["segment"], "r+b") as segment:
            segment.seek(entry["offset"] + 17)
            byte = segment.read(1)[0]
            segment.seek(entry["offset"] + 17)
            segment.write(bytes([byte ^ 1]))
        with pytest.raises(ValueError, match="big arrived changed: expected 3600 bytes"):
            list(read_bucket(bucket))


def test_a_segment_cut_short_is_found() -> None:
    with BucketWriter(iter({"a": torch.zeros(64)}.items())) as writer:
        bucket = writer.next_bucket()
        assert bucket is not None and bucket["segment"] is not None
        os.truncate(SHARED_MEMORY / bucket["segment"], 100)
        with pytest.raises(ValueError, match=r"a arrived changed: expected 256 bytes.*found 100"):
            list(read_bucket(bucket))


def test_no_room_is_an_error_before_anything_is_written() -> None:
    huge = torch.zeros(1).expand(2**50)
    with (
        BucketWriter(iter([("small", torch.zeros(8)), ("huge", huge)])) as writer,
        pytest.raises(
            ValueError, match=r"too small.*huge needs \d+ bytes, found \d+ free.*shm-size"
        ),
    ):
        while writer.next_bucket() is not None:
            pass
    assert segments() == set()


def test_a_stream_that_fails_leaves_nothing_behind() -> None:
    def failing() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.zeros(8)
        raise RuntimeError("a rank died")

    writer = BucketWriter(failing())
    with pytest.raises(RuntimeError, match="a rank died"):
        writer.next_bucket()
    assert segments() == set()


def test_an_empty_stream_is_refused() -> None:
    with pytest.raises(ValueError, match="no tensor"):
        BucketWriter(iter([]))


@pytest.mark.parametrize("name", [None, "../etc/passwd", "rltrain-1-1-../x", "psm_1234"])
def test_only_our_own_names_are_opened(name: str | None) -> None:
    with pytest.raises(ValueError, match="expected a segment that a BucketWriter wrote"):
        list(read_bucket(Bucket(index=0, segment=name, last=True, tensors=[])))


def test_a_segment_that_is_gone_says_who_must_share_what() -> None:
    with BucketWriter(iter([("a", torch.zeros(1))])) as writer:
        bucket = writer.next_bucket()
    assert bucket is not None
    with pytest.raises(ValueError, match="must share one host and one /dev/shm"):
        list(read_bucket(bucket))


def test_what_a_killed_writer_left_is_removed_by_the_next() -> None:
    script = (
        "import os, signal, torch\n"
        "from rltrain.weights.transport import BucketWriter\n"
        "writer = BucketWriter(iter([('a', torch.zeros(4))]))\n"
        "print(writer.next_bucket()['segment'], flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, check=False
    )
    left = SHARED_MEMORY / Path(killed.stdout.strip()).name
    assert left.exists()
    with BucketWriter(iter([("a", torch.zeros(4))])):
        assert not left.exists()
