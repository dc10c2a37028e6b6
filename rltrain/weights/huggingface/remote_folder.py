"""A folder behind an fsspec URL, such as ``s3://bucket/run``: named objects, no rename.

Credentials are those that fsspec finds by itself, in the environment or in its files. They are
never part of a URL.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from rltrain.parallel.rendezvous import within

T = TypeVar("T")
THREADS = 8
"""Files of one process on their way at once."""
ANSWER_S = 300.0
"""How long the storage may take to answer."""
SLOWEST = 2**20
"""Bytes per second, of all files of one call together, that are not taken for a standstill."""
PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs"}
"""Object stores, and what fsspec needs for them."""


def is_url(path: str | Path) -> bool:
    return "://" in str(path)


@dataclass(frozen=True)
class RemoteFolder:
    """Names are relative to ``url`` and have "/" between their parts.

    Every method raises ``RuntimeError`` if the storage refuses, cannot be reached or is silent, and
    ``ValueError`` if its package is not installed.
    """

    url: str

    def __truediv__(self, name: str) -> "RemoteFolder":
        return RemoteFolder(f"{self.url.rstrip('/')}/{name}")

    def sizes(self) -> dict[str, int]:
        """Bytes of every object below, by name."""

        def find() -> dict[str, int]:
            fs, root = self._open
            fs.invalidate_cache()  # others write here, too
            found = fs.find(root, detail=True)
            return {name[len(root) :].strip("/"): int(info["size"]) for name, info in found.items()}

        return self._ask("list", find)

    def put(self, files: Mapping[str, Path]) -> None:
        """Upload local files, several at a time."""

        def upload(name: str) -> None:
            fs, root = self._open
            self._make_parent(name)
            fs.put_file(str(files[name]), f"{root}/{name}")

        self._each("write", upload, files, sum(file.stat().st_size for file in files.values()))

    def get(self, files: Mapping[str, Path]) -> None:
        """Download to local files, several at a time."""

        def download(name: str) -> None:
            fs, root = self._open
            files[name].parent.mkdir(parents=True, exist_ok=True)
            fs.get_file(f"{root}/{name}", str(files[name]))

        sizes = self.sizes()
        self._each("read", download, files, sum(sizes.get(name, 0) for name in files))

    def write(self, name: str, data: bytes) -> None:
        def write() -> None:
            fs, root = self._open
            self._make_parent(name)
            fs.pipe_file(f"{root}/{name}", data)

        self._ask("write", write)

    def read(self, name: str) -> bytes:
        def read() -> bytes:
            fs, root = self._open
            return bytes(fs.cat_file(f"{root}/{name}"))

        return self._ask("read", read)

    def remove(self, names: Iterable[str]) -> None:
        """Those that are there; others are no error."""

        def remove() -> None:
            fs, root = self._open
            present = [f"{root}/{name}" for name in names if fs.exists(f"{root}/{name}")]
            if present:
                fs.rm(present)

        self._ask("remove", remove)

    def _make_parent(self, name: str) -> None:
        if self.url.partition("://")[0] in PACKAGES:  # it has no folders, and would make a bucket
            return
        fs, root = self._open
        fs.makedirs(f"{root}/{name}".rpartition("/")[0], exist_ok=True)

    def _each(
        self, what: str, work: Callable[[str], None], names: Iterable[str], nbytes: int
    ) -> None:
        end = time.monotonic() + ANSWER_S + nbytes / SLOWEST

        def one(name: str) -> None:
            # In a further thread, as the process could not end with those of the pool.
            within(max(0.0, end - time.monotonic()), lambda: work(name))

        def all_of_them() -> None:
            with ThreadPoolExecutor(THREADS) as pool:
                list(pool.map(one, names))

        self._call(what, all_of_them)

    @cached_property
    def _open(self) -> tuple[Any, str]:
        import fsspec  # a run without a URL starts without it

        fs, root = fsspec.url_to_fs(self.url)
        return fs, str(root).rstrip("/")

    def _ask(self, what: str, work: Callable[[], T]) -> T:
        return self._call(what, lambda: within(ANSWER_S, work))

    def _call(self, what: str, work: Callable[[], T]) -> T:
        protocol = self.url.partition("://")[0]
        try:
            return work()
        except (ImportError, ValueError) as error:  # fsspec's, of a protocol that it cannot open
            package = PACKAGES.get(protocol)
            advice = f"pip install {package}" if package else "use s3://, gs:// or file://"
            raise ValueError(
                f"{self.url}: expected a URL that fsspec can open on this node, found "
                f"{protocol}:// ({error}): {advice} [RL6012]"
            ) from error
        except Exception as error:  # each storage has its own kinds
            raise RuntimeError(
                f"{self.url}: cannot {what} there: {type(error).__name__}: {error}. Check the URL, "
                "the network and this node's credentials (docs/checkpoints.md) [RL6012]"
            ) from error
