"""Break runs in every way that is known, and write down what became of them.

    python -m tests.chaos [--only TEXT ...]      # run what has TEXT in its name, all without
    python -m tests.chaos --with cluster.device=cuda rollout.enforce_eager=true     # on GPUs
    python -m tests.chaos --table            # write docs/reliability.md from what has been run

Results are kept in ``build/chaos``, a file per run, so that some can be run again.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.chaos.plan import whole
from tests.chaos.results import keep, write_table
from tests.chaos.run import Reference, execute

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "build" / "chaos"
TABLE = ROOT / "docs" / "reliability.md"
INSIDE = "RLTRAIN_CHAOS_INSIDE"


def enter_namespace() -> None:
    """Go on in a mount namespace, where small disks can be mounted, unless this is one."""
    if os.environ.get(INSIDE):
        return
    command = ["unshare", "-rm", sys.executable, "-m", "tests.chaos", *sys.argv[1:]]
    sys.exit(subprocess.run(command, env=os.environ | {INSIDE: "1"}, check=False).returncode)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument(
        "--only", nargs="+", default=[""], help="run what has one of these in its name"
    )
    parser.add_argument("--phases", nargs="+", help="only the faults in these")
    parser.add_argument(
        "--with", nargs="+", default=[], dest="overrides", help="overrides of every run"
    )
    parser.add_argument("--table", action="store_true", help="only write the table")
    asked = parser.parse_args()
    is_well = True
    if not asked.table:
        enter_namespace()
        # Of this run alone, so that what is left there is of its making.
        subprocess.run(["mount", "-t", "tmpfs", "none", "/dev/shm"], check=True)
        planned = [one.restricted(asked.phases, asked.overrides) for one in whole()]
        chosen = [one for text in asked.only for one in planned if one.faults and text in one.name]
        if not chosen:
            sys.exit(f"nothing to run; expected --only with a part of {[p.name for p in planned]}")
        with tempfile.TemporaryDirectory(prefix="rc-", dir="/tmp") as folder:
            reference = Reference(Path(folder))
            for planned in chosen:
                began = time.monotonic()
                chain = execute(planned, reference)
                keep(RESULTS, planned.name, chain)
                same = all(row.bitwise for row in chain.rows)
                said = chain.failure or ("as undisturbed" if same else "NOT THE SAME")
                took = f"{time.monotonic() - began:.0f} s"
                sys.stdout.write(f"{planned.name}: {said}, {took}\n")
                sys.stdout.flush()
                is_well &= same and not chain.failure
    write_table(TABLE, RESULTS)
    sys.exit(not is_well)


if __name__ == "__main__":
    main()
