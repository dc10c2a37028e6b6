"""Adam in Megatron's distributed optimizer, and its learning-rate schedule."""

import math
from collections.abc import Sequence

import torch
from megatron.core.optimizer import MegatronOptimizer, ParamKey, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer.optimizer_config import ParamPredicate
from megatron.core.optimizer_param_scheduler import ParamGroupOverride

from rltrain.config.optimizer import OptimizerConfig
from rltrain.config.policy import PrecisionConfig
from rltrain.policy.finite import NotFinite, first_nonfinite
from rltrain.policy.megatron.transformer_options import params_dtype


def build_optimizer(
    chunks: Sequence[torch.nn.Module],
    config: OptimizerConfig,
    precision: PrecisionConfig,
    device: torch.device,
    *,
    total_updates: int | None = None,
) -> tuple[MegatronOptimizer, "LearningRate"]:
    """AdamW with its state sharded over data-parallel ranks, and its learning rate.

    Norms get no weight decay. The fp32 master weights of bf16 parameters are copies made by this
    call: load weights first, or call ``optimizer.reload_model_params()`` after loading.

    Args:
        chunks: wrapped in DDP, as from ``build_model``
        total_updates: where the ``linear`` and ``cosine`` schedules end
    """
    dtype = params_dtype(precision, device)
    megatron_config = MegatronOptimizerConfig(
        lr=config.lr,
        min_lr=config.min_lr,
        weight_decay=config.weight_decay,
        adam_beta1=config.beta1,
        adam_beta2=config.beta2,
        adam_eps=config.eps,
        clip_grad=config.clip_grad,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_distributed_optimizer=True,
    )
    optimizer = get_megatron_optimizer(
        megatron_config,
        list(chunks),
        config_overrides=_overrides(config),
        use_gloo_process_groups=False,
    )
    for group in optimizer.param_groups:
        group["weight_decay"] = config.weight_decay * group["wd_mult"]
    _fill_state(optimizer)
    return optimizer, LearningRate(optimizer, config, total_updates)


def take_step(
    optimizer: MegatronOptimizer, chunks: Sequence[torch.nn.Module], loss: float = 0.0
) -> float:
    """Clip the gradients, update the parameters; returns the gradient norm before clipping.

    Collective over all ranks.

    Args:
        loss: this rank's part of it

    Raises:
        NotFinite: on all ranks, where the norm or the loss of one is not finite. Nothing was
            updated.
    """
    optimizer.prepare_grads()
    norm = float(optimizer.get_grad_norm())
    if (found := first_nonfinite(loss, norm, chunks)) is not None:
        raise NotFinite(found)
    optimizer.step()
    return norm


class LearningRate:
    """Sets the learning rate of each update. ``update`` counts the updates so far."""

    def __init__(
        self, optimizer: MegatronOptimizer, config: OptimizerConfig, total_updates: int | None
    ) -> None:
        if config.schedule != "constant" and total_updates is None:
            raise ValueError(f"optimizer.schedule={config.schedule} needs the number of updates")
        self.optimizer = optimizer
        self.config = config
        self.total_updates = total_updates or 1
        self.update = 0

    def step(self) -> float:
        """Set the rates of the next update. Returns the rate of all parameters but the routers."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr_at(self.config, self.update, self.total_updates, peak=group["max_lr"])
        lr = lr_at(self.config, self.update, self.total_updates)
        self.update += 1
        return lr


def lr_at(
    config: OptimizerConfig, update: int, total_updates: int, *, peak: float | None = None
) -> float:
    """The learning rate of update number ``update``, counted from 0.

    It rises linearly over ``warmup_steps`` updates to ``peak``, by default ``config.lr``. Then it
    stays there, or falls to the lower of ``min_lr`` and ``peak`` at ``total_updates``.
    """
    peak = config.lr if peak is None else peak
    floor = min(config.min_lr, peak)
    if update < config.warmup_steps:
        return peak * (update + 1) / config.warmup_steps
    if config.schedule == "constant":
        return peak
    done = (update - config.warmup_steps) / max(1, total_updates - config.warmup_steps)
    done = min(1.0, done)
    left = 1 - done if config.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return floor + (peak - floor) * left


def _overrides(config: OptimizerConfig) -> dict[ParamKey, ParamGroupOverride]:
    is_norm = ParamPredicate(name="norm", fn=lambda param: param.ndim == 1)
    overrides = {ParamKey(predicate=is_norm): ParamGroupOverride(wd_mult=0.0)}
    if config.router_lr is not None:
        # In checkpoints Megatron distinguishes parameter groups by is_decoupled_lr, not by max_lr.
        overrides[ParamKey(name="*.mlp.router.weight")] = ParamGroupOverride(
            max_lr=config.router_lr,
            is_decoupled_lr=True,  # type: ignore[typeddict-unknown-key]
        )
    return overrides


def _fill_state(optimizer: MegatronOptimizer) -> None:
    """Give torch's Adam the state that it would create at its first step.

    Megatron cannot write or read a checkpoint of an optimizer without state. It handles Transformer
    Engine's Adam, which keeps its step elsewhere.
    """
    for part in optimizer.chained_optimizers:
        if not isinstance(part.optimizer, torch.optim.AdamW):
            continue
        for group in part.optimizer.param_groups:
            for param in group["params"]:
                part.optimizer.state[param] = {
                    "step": torch.tensor(0.0),
                    "exp_avg": torch.zeros_like(param),
                    "exp_avg_sq": torch.zeros_like(param),
                }
