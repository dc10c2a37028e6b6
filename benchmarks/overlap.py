"""What `policy.overlap_grad_reduce` gains: updates with it and without, by two data-parallel ranks.

    python -m benchmarks.overlap [--out FILE] [--layers 4] [--device cuda] [--rounds 8] [--turns 2]
        [--shapes NAME=SEQUENCESxTOKENSxMICRO_BATCHES ...]

Whole updates, the optimizer's step too, of a slice of Qwen3-30B-A3B with random weights, every rank
on random tokens of its own and with all experts (``--device cpu``: a tiny model). The two
cannot be loaded side by side in one process. So they alternate, ``--turns`` times, and load each
time.
"""

import argparse
import gc
import json
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.models import MODELS, random_model, random_slice
from benchmarks.result import Result, median_interval
from benchmarks.train import TINY, Shape, timed
from rltrain.config import Config
from rltrain.policy.ranks import rendezvous, run_ranks

RANKS = 2
SHAPES = ("one=8x2048x1", "four=8x2048x4")
WARM_UP = 2


def on_rank(
    rank: int, folder: Path, model: str, device: str, shapes: Sequence[str], rounds: int, turns: int
) -> None:
    """Writes seconds by shape, overlap or not, and update."""
    from rltrain.policy.megatron.mesh import destroy_mesh
    from rltrain.policy.worker import PolicyWorker

    own = torch.device("cuda", rank) if device == "cuda" else torch.device("cpu")
    if device == "cuda":
        torch.cuda.set_device(own)
    found: dict[str, dict[str, list[float]]] = {shape: {} for shape in shapes}
    for turn in range(turns):
        for overlap in (False, True):
            policy = {"parallel": {"dp": RANKS, "ep": 1}, "overlap_grad_reduce": overlap}
            config = Config.model_validate(
                {
                    "cluster": {"device": device},
                    "policy": {**policy, "max_tokens_per_micro_batch": 2**20},
                }
            )
            worker = PolicyWorker(config, rank, rendezvous(folder, f"{turn}{overlap}"), model, own)
            for shape in shapes:
                seconds = updates(worker, Shape.parse(shape), rounds)
                found[shape].setdefault("overlap" if overlap else "after", []).extend(seconds)
            del worker
            gc.collect()
            destroy_mesh()
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found))


def updates(worker: Any, shape: Shape, rounds: int) -> list[float]:
    batch, plan = shape.batch(worker.arch.vocab_size, seed=worker.mesh.dp_rank)
    worker.begin_step(batch)
    seconds = []
    for _ in range(WARM_UP + rounds):
        torch.distributed.barrier()
        seconds.append(timed(partial(worker.update, plan, {}, routing="native")))
    return seconds[WARM_UP:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    settings = {k: v for k, v in vars(args).items() if k != "out"}
    result = Result("overlap", settings={**settings, "ranks": RANKS})
    with tempfile.TemporaryDirectory(prefix="rltrain-overlap-") as name:
        folder = Path(name)
        if args.device == "cpu":
            random_model(folder / "model", TINY)
            model = folder / "model"
        else:
            model = random_slice(MODELS, layers=args.layers)
        given = (str(model), args.device, args.shapes, args.rounds, args.turns)
        run_ranks(on_rank, RANKS, folder, *given, device=args.device)
        found = json.loads((folder / "found.json").read_text())
    for text, seconds in found.items():
        shape = Shape.parse(text)
        for name, values in seconds.items():
            rate = RANKS * shape.num_tokens / median(values)
            result.measure(f"{shape.name}/{name}_tokens_per_second", rate)
        pairs = zip(seconds["after"], seconds["overlap"], strict=True)
        faster = median_interval([after / overlap for after, overlap in pairs])
        result.ratio(f"{shape.name}/overlap_over_after", faster)
    result.write(args.out)


if __name__ == "__main__":
    main()
