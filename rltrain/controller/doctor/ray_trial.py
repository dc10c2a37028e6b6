"""Starts Ray as a run does, runs one task, and ends it: ``python -m`` of this file, in a process of
its own, so that nothing of Ray stays in the caller."""

import sys
import time

import ray

from rltrain.controller.cluster.running_ray import running_ray


def main() -> None:
    address = sys.argv[1] if len(sys.argv) > 1 else None
    began = time.monotonic()
    try:
        with running_ray(address, start_timeout_s=0.0):  # once: the doctor tells how it went
            seconds = time.monotonic() - began
            ray.get(ray.remote(_nothing).options(num_cpus=0).remote())
            total = time.monotonic() - began
    except RuntimeError as error:
        sys.exit(str(error))
    sys.stdout.write(f"started in {seconds:.1f} s, first task after {total:.1f} s\n")


def _nothing() -> None:
    pass


if __name__ == "__main__":
    main()
