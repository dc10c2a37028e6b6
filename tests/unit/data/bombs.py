"""Reads files with little memory, and says how each ends.

python -m tests.unit.data.bombs FILE ...
"""

import json
import resource
import sys
from pathlib import Path

from rltrain.config.data import DataConfig
from rltrain.data.problems import load_problems
from rltrain.data.tokenizer import tiny_tokenizer

ADDRESSES = 8 * 2**30
"""Bytes of address space beside what was loaded before: a failure must not fill the machine. Arrow
reserves much that it never uses, so what is used is told for each file."""


def peak_bytes() -> int:
    """The most memory that this process has had so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main(files: list[str]) -> None:
    import pyarrow.compute
    import pyarrow.parquet  # noqa: F401

    tokenizer = tiny_tokenizer()
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + ADDRESSES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    before = peak_bytes()
    for file in files:
        source = "parquet" if file.endswith(".parquet") else "jsonl"
        config = DataConfig(source=source, path=file, eval_size=0, on_bad_row="drop")
        try:
            found = f"read {len(load_problems(config, tokenizer).train)}"
        except ValueError as error:
            found = str(error)
        except BaseException as error:  # reported: the test names what may end a file
            found = f"{type(error).__name__}: {error}"
        sys.stdout.write(json.dumps([Path(file).name, found, peak_bytes() - before]) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
