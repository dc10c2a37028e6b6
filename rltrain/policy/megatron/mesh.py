"""The mesh: this rank's place in the layout. Reads Megatron's parallel_state."""

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from rltrain.config.policy import ParallelConfig
from rltrain.parallel.rendezvous import Rendezvous
from rltrain.parallel.token_layout import TokenGrid


@dataclass(frozen=True)
class Mesh:
    """Sizes of the layout and this rank's place in it. ``dp`` excludes context parallelism."""

    rank: int
    world_size: int
    tp_size: int
    tp_rank: int
    cp_size: int
    cp_rank: int
    pp_size: int
    pp_rank: int
    vpp_size: int
    dp_size: int
    dp_rank: int
    ep_size: int
    ep_rank: int
    etp_size: int
    etp_rank: int

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp_size - 1

    @property
    def is_output_rank(self) -> bool:
        """Whether this rank returns results for all that hold the same sequences and layers."""
        return self.tp_rank == 0 and self.cp_rank == 0

    def reads_tokens(self, chunk: int) -> bool:
        """Whether this stage's chunk is the first of the model."""
        return self.pp_rank == 0 and chunk == 0

    def yields_logits(self, chunk: int) -> bool:
        """Whether this stage's chunk is the last of the model."""
        return self.is_last_stage and chunk == self.vpp_size - 1

    @property
    def token_grid(self) -> TokenGrid:
        """This rank's place among those that share its data-parallel rank's tokens."""
        return TokenGrid(self.tp_size, self.tp_rank, self.cp_size, self.cp_rank)

    @property
    def tp_group(self) -> dist.ProcessGroup:
        return parallel_state.get_tensor_model_parallel_group()

    @property
    def cp_group(self) -> dist.ProcessGroup:
        return parallel_state.get_context_parallel_group()

    @property
    def tp_cp_group(self) -> dist.ProcessGroup:
        """Ranks that share one data-parallel rank's tokens."""
        return parallel_state.get_tensor_and_context_parallel_group()

    @property
    def pp_group(self) -> dist.ProcessGroup:
        return parallel_state.get_pipeline_model_parallel_group()

    @property
    def dp_group(self) -> dist.ProcessGroup:
        """Ranks with the same parameters and different sequences."""
        return parallel_state.get_data_parallel_group()

    @property
    def dp_cp_group(self) -> dist.ProcessGroup:
        """Ranks with the same parameters and different tokens."""
        return parallel_state.get_data_parallel_group(with_context_parallel=True)

    @property
    def ep_group(self) -> dist.ProcessGroup:
        return parallel_state.get_expert_model_parallel_group()

    @property
    def etp_group(self) -> dist.ProcessGroup:
        return parallel_state.get_expert_tensor_parallel_group()


def init_mesh(
    parallel: ParallelConfig,
    rank: int,
    world_size: int,
    rendezvous: Rendezvous,
    device: torch.device,
    *,
    seed: int = 0,
    start_timeout_s: float = 1800.0,
    timeout_s: float = 1800.0,
) -> Mesh:
    """Meet the other ranks and form the groups.

    Collective: all ``world_size`` ranks call it, with the same arguments except ``rank``.

    Args:
        start_timeout_s: limit of meeting and connecting
        timeout_s: limit of every later collective

    Raises:
        ValueError: ``world_size`` is not what ``parallel`` needs.
        RendezvousFailed: a rank does not come, or cannot be connected.
    """
    if world_size != parallel.world_size:
        raise ValueError(
            f"policy.parallel needs tp*pp*cp*dp={parallel.world_size} ranks, found {world_size}: "
            "change policy.parallel.dp or start that many"
            " [RL1010]"
        )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = rendezvous.join(rank, world_size, start_timeout_s)
    store.set_timeout(timedelta(seconds=timeout_s))
    backend = "nccl" if device.type == "cuda" else "gloo"

    def connect() -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # of this thread
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=start_timeout_s),
        )
        if len(rendezvous.nodes) > 1:
            # NCCL connects at the first call. Connect here, where an error names its cause.
            dist.all_reduce(torch.zeros(1, device=device))
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    rendezvous.connect(rank, backend, connect, start_timeout_s)
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s))
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        virtual_pipeline_model_parallel_size=parallel.vpp if parallel.vpp > 1 else None,
        context_parallel_size=parallel.cp,
        expert_model_parallel_size=parallel.ep,
        expert_tensor_parallel_size=parallel.etp,
        distributed_timeout_minutes=max(1, int(timeout_s // 60)),
        create_gloo_process_groups=False,
    )
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    return _read_mesh()


def destroy_mesh() -> None:
    """Leave all groups. Another mesh may be formed afterwards.

    On a CPU the threads of the groups end only when the last model that uses them is deleted.
    """
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def _read_mesh() -> Mesh:
    state = parallel_state
    return Mesh(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        tp_size=state.get_tensor_model_parallel_world_size(),
        tp_rank=state.get_tensor_model_parallel_rank(),
        cp_size=state.get_context_parallel_world_size(),
        cp_rank=state.get_context_parallel_rank(),
        pp_size=state.get_pipeline_model_parallel_world_size(),
        pp_rank=state.get_pipeline_model_parallel_rank(),
        vpp_size=state.get_virtual_pipeline_model_parallel_world_size() or 1,
        dp_size=state.get_data_parallel_world_size(),
        dp_rank=state.get_data_parallel_rank(),
        ep_size=state.get_expert_model_parallel_world_size(),
        ep_rank=state.get_expert_model_parallel_rank(),
        etp_size=state.get_expert_tensor_parallel_world_size(),
        etp_rank=state.get_expert_tensor_parallel_rank(),
    )
