"""Whether the GPUs can run what a run starts. Pure: judges what NVML said."""

from collections.abc import Iterator, Sequence

from rltrain.controller.doctor.findings import Finding, fail, not_applicable, ok, warn
from rltrain.planning.memory_terms import gib
from rltrain.tracking.gpu_health import GpuState


def check_gpus(gpus: Sequence[GpuState], files: int) -> Iterator[Finding]:
    """
    Args:
        gpus: as NVML lists them
        files: GPUs that this process may use, by the driver's device files
    """
    if not gpus and not files:
        yield not_applicable("GPU", "none on this machine: runs compute on its CPU")
        return
    if not gpus:
        yield fail(
            "GPU",
            f"{files} device files, and NVML lists no GPU",
            "see nvidia-smi: the driver may have been updated without a restart",
        )
        return
    if not files:
        yield warn(
            "GPU",
            f"{len(gpus)} GPUs, and this process may use none of them",
            "see CUDA_VISIBLE_DEVICES; start a container with --gpus all",
        )
    for gpu in gpus:
        yield from _check_gpu(gpu)


def _check_gpu(gpu: GpuState) -> Iterator[Finding]:
    name = f"GPU {gpu.index}"
    said = f"{gpu.name}, {gib(gpu.total - gpu.used)} of {gib(gpu.total)} free"
    problems = list(_gpu_problems(name, gpu))
    yield from problems or [ok(name, said)]


def _gpu_problems(name: str, gpu: GpuState) -> Iterator[Finding]:
    if gpu.ecc_errors:
        yield fail(
            name,
            f"{gpu.name} had {gpu.ecc_errors} memory errors that ECC could not correct",
            "reset or replace the GPU (nvidia-smi -q -d ECC)",
        )
    if gpu.used > gpu.total // 10:
        owners = ", ".join(f"process {pid} ({gib(used)})" for pid, used in gpu.processes)
        yield warn(
            name,
            f"{gib(gpu.used)} of {gib(gpu.total)} of {gpu.name} are in use"
            + (f" by {owners}" if owners else ""),
            "end the other process: vLLM and trainer plan with memory that is free at start",
        )
    if gpu.mig:
        yield warn(
            name,
            f"{gpu.name} is divided by MIG: NCCL does not connect its parts",
            "use one MIG part per run with one rank, or switch MIG off",
        )
    if gpu.exclusive:
        yield fail(
            name,
            f"{gpu.name} is in exclusive mode: engine and trainer cannot share it",
            f"nvidia-smi -i {gpu.index} -c DEFAULT",
        )


def check_peers(blocked: Sequence[tuple[int, int]], num_gpus: int, nccl: str | None) -> Finding:
    """
    Args:
        blocked: pairs of GPUs that cannot read each other's memory
        nccl: version of the installed NCCL
    """
    if num_gpus < 2:
        return not_applicable("NCCL", "needs two GPUs or more")
    if nccl is None:
        return fail("NCCL", "no nvidia-nccl package is installed", "install the GPU stack")
    if blocked:
        pairs = ", ".join(f"{a}-{b}" for a, b in blocked)
        return warn(
            "NCCL",
            f"NCCL {nccl}; no peer access between GPUs {pairs}: data go through host memory",
            "see nvidia-smi topo -p2p r; in a virtual machine ask for NVLink or ACS to be enabled",
        )
    return ok("NCCL", f"{nccl}, peer access between all {num_gpus} GPUs")
