"""Sampling and training distribution are one at any temperature: a vLLM engine, a policy worker.

Both in fp32, so that nothing but the order of sums sets them apart.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rltrain.batch import Batch
from rltrain.config import Config
from rltrain.verification.routes_file import Routes
from tests.distributed.run_ranks import rendezvous, run_ranks
from tests.distributed.tiny_families import make
from tests.integration.family_engine import PROMPT_TOKENS

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,  # a run at 0.7 is among the whole runs of test_run
    pytest.mark.timeout(600),
    pytest.mark.skipif(torch.cuda.is_available(), reason="CPU"),
]
TEMPERATURES = ("0.7", "1.5")
UNSCALED = "1.0"
"""What a trainer computes that ignores the temperature."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("temperature")
    make("qwen3_moe", 0.5).save_pretrained(folder / "model")
    command = [sys.executable, "-m", "tests.integration.family_engine", "float32"]
    subprocess.run([*command, ",".join(TEMPERATURES), str(folder)], check=True, timeout=540)
    run_ranks(score_samples, 1, folder)
    return folder


def score_samples(rank: int, folder: Path) -> None:
    """What was sampled at each temperature, scored by a worker at that one and at 1."""
    from rltrain.policy.megatron.mesh import destroy_mesh
    from rltrain.policy.worker import PolicyWorker

    for temperature in (*TEMPERATURES, UNSCALED):
        config = Config.model_validate({"rollout": {"temperature": float(temperature)}})
        at, cpu = rendezvous(folder, temperature), torch.device("cpu")
        worker = PolicyWorker(config, rank, at, str(folder / "model"), cpu)
        for sampled in TEMPERATURES:
            routes = Routes.load(folder / f"float32.{sampled}.routes.safetensors")
            lens, mask = routes.seq_lens, routes.route_mask
            batch = Batch(tokens=routes.tokens, seq_lens=lens, response_mask=mask)
            worker.begin_step(batch)
            scored = worker.score([list(range(len(lens)))], routing="native")
            assert scored is not None and scored.logprobs is not None
            name = f"{sampled} scored at {temperature}.safetensors"
            save_file({"logprobs": scored.logprobs}, folder / name)
        destroy_mesh()


def difference(folder: Path, sampled: str, scored: str) -> Tensor:
    """Policy less engine, of the sampled tokens."""
    engine = load_file(folder / f"float32.{sampled}.logprobs.safetensors")["logprobs"]
    policy = load_file(folder / f"{sampled} scored at {scored}.safetensors")["logprobs"]
    lens = Routes.load(folder / f"float32.{sampled}.routes.safetensors").seq_lens
    return (policy - engine)[torch.arange(len(engine)) % int(lens[0]) >= PROMPT_TOKENS].abs()


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_the_engine_reports_the_log_probabilities_the_trainer_computes(
    root: Path, temperature: str
) -> None:
    found = difference(root, temperature, temperature)
    assert found.mean() < 1e-6 and found.max() < 1e-5  # 4e-7 and 2.6e-6 at 0.7 on one machine
    assert difference(root, temperature, UNSCALED).mean() > 0.1
