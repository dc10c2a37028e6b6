"""A bad link where the kernel has no netem: two TAP devices and this process between them.

``python relay.py PORT DELAY_MS LOSS RATE_MBIT SEED``: makes the devices PORT and PORTx in its
network namespace, prints ``ready`` and hands frames from each to the other, later, slower and not
all. Of the standard library alone.
"""

import fcntl
import os
import random
import select
import struct
import sys
import time
from collections import deque
from contextlib import suppress

TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
QUEUE_S = 0.4
"""What waits longer for the link is lost, as in a router with a full queue."""
BATCH = 64


def tap(name: str) -> int:
    """A new device; what the kernel sends there is read from the file, and the other way round.
    Without more flags frames come whole and with their checksums."""
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(file, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI))
    return file


class Direction:
    """Frames from one device to the other."""

    def __init__(
        self, source: int, target: int, delay_s: float, loss: float, rate: float, seed: int
    ) -> None:
        """``rate`` is in bytes a second."""
        self.source, self.target = source, target
        self._delay_s, self._loss, self._rate = delay_s, loss, rate
        self._random = random.Random(seed)
        self._free_at = 0.0
        self._waiting: deque[tuple[float, bytes]] = deque()

    def read(self, now: float) -> None:
        for _ in range(BATCH):
            try:
                frame = os.read(self.source, 65536)
            except BlockingIOError:
                return
            except OSError:  # its network has ended
                sys.exit()
            begin = max(now, self._free_at)
            if begin - now > QUEUE_S or self._random.random() < self._loss:
                continue
            self._free_at = begin + len(frame) / self._rate
            self._waiting.append((self._free_at + self._delay_s, frame))

    def write(self, now: float) -> None:
        while self._waiting and self._waiting[0][0] <= now:
            with suppress(OSError):  # the device is down, or full: frames get lost there
                os.write(self.target, self._waiting.popleft()[1])

    @property
    def next_at(self) -> float:
        return self._waiting[0][0] if self._waiting else float("inf")


def relay(port: str, delay_ms: float, loss: float, rate_mbit: float, seed: int) -> None:
    ends = [tap(port), tap(f"{port}x")]
    rate = rate_mbit * 1e6 / 8
    ways = [Direction(ends[n], ends[1 - n], delay_ms / 1e3, loss, rate, seed + n) for n in range(2)]
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    while True:
        next_at = min(way.next_at for way in ways)
        wait = max(0.0, min(1.0, next_at - time.monotonic()))
        readable, _, _ = select.select(ends, [], [], wait)
        now = time.monotonic()
        for way in ways:
            if way.source in readable:
                way.read(now)
            way.write(now)


if __name__ == "__main__":
    name, delay, lost, mbit, begin = sys.argv[1:]
    relay(name, float(delay), float(lost), float(mbit), int(begin))
