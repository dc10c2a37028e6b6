"""How far rounding moves a router's choice on this machine: the noise of the gate on routes.

    python -m benchmarks.route_noise [--train-seconds 120] [--quantizations none fp8] [--out FILE]

Trains a small mixture of experts (`benchmarks.pretrain`), lets vLLM sample from it in bf16 and, on
a GPU, in FP8, and replays vLLM's routes in the trainer, as a measured step of mode r3 does. It
writes, per layer, the scale of the noise and how many scales the worst expert of each replayed row
lies below the trainer's own choice. Per sample and per row it writes how often that is wide.
"""

import argparse
import dataclasses
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.mismatch import Device, _sampled_apart, batch_of, parse_sizes, scorer
from benchmarks.models import random_model
from benchmarks.pretrain import Shape, corpus, plan_of, pretrain, start_worker, training_config
from benchmarks.result import Result
from rltrain.batch import Batch
from rltrain.routing.deficits import upper_edges
from rltrain.routing.flips import judged_rows
from rltrain.routing.noise import noise_scale

if TYPE_CHECKING:
    from rltrain.policy.passes.passes import ModelOnMesh

SCALES = (2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 16.0, 24.0)


def noise(model: "ModelOnMesh", batch: Batch, shape: Shape, device: torch.device) -> dict[str, Any]:
    """What `main` writes of one engine's samples."""
    from rltrain.policy.passes.micro_batch import cut
    from rltrain.policy.passes.passes import score

    routes, mask = batch.require("rollout_expert_indices", "route_mask")
    count, n = batch.num_sequences, batch.num_tokens
    replayed = batch.with_fields(replay_expert_indices=routes, replay_mask=mask)
    plan = plan_of(count, n // count, shape)
    cuts = cut(replayed, plan, model.mesh.token_grid, device)
    found = score(model, cuts, n, replay=True, record=True, compare=True).recorded
    assert found is not None and found.flips is not None and found.deficits is not None
    judged = judged_rows(mask, batch.seq_lens)
    rows = int(judged.sum())
    scales = [noise_scale(flips.runners_up) for flips in found.flips.values()]
    spreads = [flips.spread / rows for flips in found.flips.values()]
    worst = upper_edges()[found.deficits[judged].amax(2).long()]  # [rows, L]
    in_scales = worst / torch.tensor(scales)
    of_sample = torch.arange(count).repeat_interleave(batch.seq_lens)[judged]
    report: dict[str, Any] = {
        "rows": rows,
        "layers": list(found.flips),
        "scale_over_spread": [s / spread for s, spread in zip(scales, spreads, strict=True)],
        "spread": spreads,
        "flipped_rows": (worst > 0).double().mean(0).tolist(),
        "worst_in_scales": in_scales.amax(0).tolist(),
        "worst_in_spreads": (worst / torch.tensor(spreads)).amax(0).tolist(),
        "wide": {},
    }
    for scale in SCALES:
        wide = in_scales > scale
        by_sample = torch.zeros(count, dtype=torch.int64).index_add_(0, of_sample, wide.sum(1))
        report["wide"][str(scale)] = {
            "fraction": float(wide.double().mean()),
            "layers": wide.double().mean(0).tolist(),
            "rows_by_wide_layers": wide.sum(1).bincount().tolist(),
            "samples_by_wide": by_sample.bincount().tolist() if scale >= 6 else None,
        }
    return report


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.route_noise")
    has_gpu = torch.cuda.is_available()
    device: Device = "cuda" if has_gpu else "cpu"
    parser.add_argument("--train-seconds", type=float, default=120.0)
    parser.add_argument("--quantizations", nargs="+", choices=("none", "fp8"))
    parser.add_argument("--out", type=Path)
    options, shape, sizes = parse_sizes(parser)
    wanted = options.quantizations or (["none", "fp8"] if has_gpu else ["none"])
    result = Result("route_noise", {**dataclasses.asdict(shape), **dataclasses.asdict(sizes)})
    with tempfile.TemporaryDirectory(prefix="rltrain-route-noise-") as name:
        folder = Path(name)
        random_model(folder / "random", shape.config())
        text, held_out = corpus(shape.corpus_mb * 10**6)
        worker = start_worker(training_config(shape, device), folder, folder / "random", device)
        for metric, value in pretrain(worker, shape, text, held_out, options.train_seconds).items():
            result.measure(metric, value)
        for kind in wanted:
            worker.export(str(folder / kind / "trained"), "bfloat16", fp8=kind == "fp8")
        worker.export(str(folder / "trained"), "bfloat16")
        del worker.optimizer, worker.learning_rate, worker.chunks, worker.model
        starts = torch.linspace(0, len(held_out) - sizes.prompt_tokens, sizes.prompts).long()
        prompts = torch.stack([held_out[s : s + sizes.prompt_tokens] for s in starts]).long()
        for kind in wanted:
            sampled = _sampled_apart(folder / kind / "trained", prompts, sizes, "params", device)
            if sampled is None:
                raise RuntimeError(f"the engine with quantization={kind} failed, see above")
            batch = batch_of(sampled, sizes)
            trainer = scorer(worker, folder / "trained", "params")
            result.measured[f"engine {kind}"] = noise(trainer, batch, shape, worker.device)
    torch.distributed.destroy_process_group()
    result.write(options.out)


if __name__ == "__main__":
    main()
