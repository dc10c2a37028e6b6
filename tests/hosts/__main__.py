"""``python -m tests.hosts up 3``: hosts to play with, until Ctrl-C.

Prints how to run a command on each, and the address of the Ray cluster over them.
"""

import argparse
import shlex
import signal
import sys
import tempfile
from pathlib import Path

from tests.hosts.links import Quality
from tests.hosts.stage import Stage, stage


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.hosts")
    parser.add_argument("command", choices=["up"])
    parser.add_argument("hosts", type=int, help="how many, the first with Ray's head and no CPU")
    parser.add_argument("--cpus", type=int, default=3, help="that Ray counts on each of the others")
    parser.add_argument("--bad", action="store_true", help="a bad cable at the last host")
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    cpus = [0, *[asked.cpus] * (asked.hosts - 1)]
    with tempfile.TemporaryDirectory(prefix="rltrain-hosts-") as folder:
        try:
            with stage(Path(folder) / "stage", cpus, bad=Quality() if asked.bad else None) as made:
                sys.stdout.write(f"{describe(made)}\n")
                sys.stdout.flush()
                signal.pause()
        except KeyboardInterrupt:
            sys.stdout.write("\n")
    return 0


def describe(made: Stage) -> str:
    lines = [f"no real hosts: {made.why_not}"] if made.why_not else []
    lines += [f"cluster.address={made.address}   shared folder: {made.shared}"]
    lines += [f"the last cable: {made.cable_is}"] if made.cable_is != "good" else []
    for machine in made.hosts:
        env = ["env", "-i", *(f"{name}={value}" for name, value in machine.environment.items())]
        words = machine.command([*env, "TERM=xterm", "bash"])
        lines.append(f"{machine.name} ({machine.address}): {shlex.join(words)}")
    return "\n".join([*lines, "Ctrl-C ends them."])


if __name__ == "__main__":
    sys.exit(main())
