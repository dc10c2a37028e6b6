"""``rltrain plan`` prints what a run needs and what does not fit, and starts nothing."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rltrain.cli.app import main
from rltrain.cli.plan_command import with_architecture
from rltrain.controller.checks.model_checks import read_model
from rltrain.main import compose
from rltrain.planning.activations import micro_batches_in_flight
from rltrain.planning.engine_memory import engine_memory, kv_bytes_per_token
from rltrain.planning.memory_terms import GIB
from rltrain.planning.plan_cpu import Host, describe_cpu
from rltrain.planning.policy_memory import count, passes, scoring, states
from rltrain.weights.families import read_architecture

ROOT = Path(__file__).parents[3]
RECIPE = "+recipe=grpo_qwen3_30b_a3b_8gpu"
CUDA = "cluster.device=cuda"
QWEN3 = read_architecture(ROOT / "conf" / "model" / "Qwen3-30B-A3B")
LATENT = read_architecture(ROOT / "conf" / "model" / "Moonlight-16B-A3B")


def printed(capsys: pytest.CaptureFixture[str], *arguments: str, status: int) -> str:
    assert main(["plan", *arguments]) == status
    return capsys.readouterr().out


def test_the_tiny_recipe_fits_one_gpu_in_turns(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "+recipe=grpo_moe_r3", "--gpus", "1", status=0)
    assert "64 prompts x 8 responses = 512 sequences a step = 4 updates x 128" in text
    assert "model: qwen3_moe, 2,643,328 parameters, 4 layers, 32 experts, 4 a token" in text
    assert "  engines: 1 x 1 = 1 ranks, alternating with the policy on its GPUs\n  GPUs: 1," in text


def test_several_nodes_have_a_map_and_the_bytes_between_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    recipe = "+recipe=grpo_qwen3_30b_a3b_32gpu"
    text = printed(capsys, recipe, "--gpus", "32", status=0)
    assert "  GPUs: 32, on 4 nodes; there are 32 on 4\n" in text
    assert "  node-1: policy 8-15 (stage 1); 8 GPUs\n" in text
    assert "  node-3: engines 0-3; 8 GPUs\n" in text
    *_, last = text.splitlines()
    assert last.startswith("fits: ")
    # Two borders between three stages; nothing of the gradients, as a stage fills a node.
    tokens = 2048 * 5120
    activations = 2 * 3 * tokens * 2048 * 2 / GIB
    assert f"{activations:.3f} GiB  activations of the pipeline" in text
    assert f"{tokens * 48 * 8 / GIB:.3f} GiB  routes: " in text and "estimate" not in text
    assert printed(capsys, recipe, "--nodes", "4x8", status=0) == text
    assert printed(capsys, recipe, "--nodes", "4", "--gpus", "8", status=0) == text
    uneven = printed(capsys, recipe, "--nodes=2x8,3x6", "policy.parallel.ep=4", status=0)
    assert "node-2: policy 16-19 (stage 2)" in uneven and "estimate" in uneven
    few = printed(capsys, recipe, "--nodes=3x8", "cluster.placement=disaggregated", status=1)
    assert "expected 32 (disaggregated) GPUs, found 24" in few and "  node-2  8     8 " in few
    small = printed(capsys, recipe, "--nodes=20x3", status=0)
    assert "  ep groups cross nodes: none has room for one of 8 ranks" in small
    assert "exchange among experts (estimate)" in small
    for wrong in (["--nodes=4x"], ["--nodes=0"], ["--nodes=4x8", "--gpus=8"]):
        assert main(["plan", recipe, *wrong]) == 2
        assert "expected a number of nodes" in capsys.readouterr().err
    assert main(["plan", recipe, "--cluster", "--gpus=8"]) == 2
    assert "drop one of them" in capsys.readouterr().err


def test_on_cpus_nodes_are_planned_by_their_cores(capsys: pytest.CaptureFixture[str]) -> None:
    layout = ["cluster.device=cpu", "policy.parallel.pp=2", "policy.parallel.dp=2"]
    text = printed(capsys, "+recipe=grpo_moe_r3", *layout, "--nodes=2x3", status=0)
    assert "  node-0: policy 0-1 (stage 0), engines 0\n  node-1: policy 2-3 (stage 1)\n" in text
    assert text.endswith("fits the CPUs of 2 nodes\n")
    text = printed(capsys, "+recipe=grpo_moe_r3", *layout, "--nodes=2x2", status=1)
    assert "expected 5 free CPUs (4 ranks x cluster.cpus_per_rank=1 + 1 engine" in text


@pytest.mark.parametrize(
    ("overrides", "where"),
    [
        ([], "cpu"),
        (["cluster.device=cpu"], "cpu"),
        (["--gpus=1"], "cuda"),
        ([CUDA], "cuda"),
    ],
)
def test_without_gpus_it_plans_for_the_cpu_unless_told_otherwise(
    overrides: list[str],
    where: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rltrain.planning.machine.count_gpus", lambda: 0)
    text = printed(capsys, "+recipe=grpo_moe_r3", *overrides, status=0)
    assert ("on the CPU of this machine" in text) == (where == "cpu")
    assert ("  GPUs: " in text) == (where == "cuda")


def test_the_parts_of_a_machine_add_up() -> None:
    """All ranks of all stages, a critic's too, the engines and the controller."""
    config = compose(["+recipe=ppo_moe_r3", "policy=tp2_pp2", "rollout.num_engines=3"])
    arch = read_model(config)
    text, fits = describe_cpu(config, arch, Host(4, 64 * GIB), "note", has_critic=True)
    assert fits and "11 ranks in all share 4 cores" in text
    sizes = [float(n) for n in re.findall(r"^ +([\d.]+) GiB(?:  .*)?$", text, re.MULTILINE)]
    policy, critic, engines, controller, whole = sizes[-5:]
    assert whole == pytest.approx(policy + critic + engines + controller, abs=0.003)
    assert engines == pytest.approx(3 * sizes[-6], abs=0.003)
    assert 4 < policy < 8 and 4 < critic < 8  # four ranks of each, at least 1 GiB
    small, fits = describe_cpu(config, arch, Host(4, 8 * GIB), "note", has_critic=True)
    assert not fits and f"{whole - 8:.2f} GiB too much; most is 3 engine ranks" in small
    slow, fits = describe_cpu(config, arch, Host(2, 64 * GIB), "note", has_critic=True)
    assert not fits and "11 ranks on 2 cores, at most 4 a core" in slow


def test_turns_on_one_gpu_are_added_up(capsys: pytest.CaptureFixture[str]) -> None:
    shared = [RECIPE, "cluster.placement=colocated", "--gpu-memory-gib=139.8"]
    text = printed(capsys, *shared, status=0)
    assert "  GPUs: 6," in text
    *_, engine, outside = map(float, re.findall(r"^ +([\d.]+) GiB$", text, re.MULTILINE))
    [policy] = map(float, re.findall(r"([\d.]+) GiB the fullest policy rank", text))
    phases = text.partition("by phase\n")[2].splitlines()
    sizes = [float(line.split()[0]) for line in phases[:4]]
    assert sizes[:2] == pytest.approx([engine + outside + 3, policy + 3], abs=6e-3)
    assert sizes[2] == pytest.approx(10.150 + 28.447 + outside + 3, abs=2e-3)
    # Of 16 layers with 57.45 GiB of optimizer state, 12 bytes for 2 of a parameter.
    assert sizes[3] == pytest.approx(2 * (3 * 10.150 + 3 * 57.450), rel=0.02)

    # Alone it would fit.
    tight = printed(capsys, *shared[:2], f"--gpu-memory-gib={sizes[1] - 0.1}", status=1)
    assert ": 0.10 GiB too much; most is " in tight

    often = printed(capsys, *shared, "trainer.sync_every=2", status=0).partition("by phase\n")[2]
    kept = float(often.splitlines()[3].split()[0]) - sizes[3]
    assert kept == pytest.approx(2 * 28.447, abs=2e-3)


@pytest.mark.parametrize(
    ("overrides", "answer"),
    [
        (["--gpus=5"], "expected 8 (disaggregated) or 6 (colocated) GPUs, found 5"),
        (["--gpus=7", "cluster.placement=disaggregated"], "expected 8 (disaggregated) GPUs, found"),
        # Alone on its GPUs it would fit.
        (["--gpus=7", "rollout.gpu_memory_utilization=0.96"], "engine rank: "),
        (["policy.recompute=none"], "most is activations"),
        (["policy.max_tokens_per_micro_batch=131072"], "most is a layer at work"),
        (["rollout.gpu_memory_utilization=0.99"], "lower rollout.gpu_memory_utilization"),
        (["rollout.gpu_memory_utilization=0.2"], "holds no sequence of full length"),
        (["rollout.tensor_parallel=16"], "an engine lies on one node"),
    ],
)
def test_what_does_not_fit_is_named_with_a_remedy(
    overrides: list[str], answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = printed(capsys, RECIPE, "--gpu-memory-gib=139.8", *overrides, status=1)
    assert answer in text.partition("\ndoes not fit")[2]


@pytest.mark.parametrize(
    ("override", "answer"),
    [
        ("policy.parallel.pp=5", "policy.parallel.pp=5: expected the other 5 stages"),
        ("policy.parallel.tp=8", "expected a divisor of the 4 key-value heads"),
        ("rollout.max_response_tokens=7999", "max_tokens_per_micro_batch=8192 is less"),
        ("model.path=models/none", "models/none does not exist"),
    ],
)
def test_what_cannot_be_is_refused(
    override: str, answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", RECIPE, override]) == 2
    assert answer in capsys.readouterr().err


def test_a_folder_of_the_users_own_goes_first(tmp_path: Path) -> None:
    folder = tmp_path / "Qwen3-30B-A3B"
    config = compose([RECIPE, f"model.path={folder}"])
    assert with_architecture(config)[0].model.path == str(ROOT / "conf" / "model" / "Qwen3-30B-A3B")
    folder.mkdir()
    assert with_architecture(config) == (config, str(folder))


def test_a_reference_and_a_critic_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "+recipe=grpo_moe_r3", "algorithm.kl.coef=0.01", CUDA, status=0)
    assert "  reference: 2,643,328 x 2\n" in text
    # 272 rows of 128 less one row.
    text = printed(capsys, "+recipe=ppo_moe_r3", CUDA, status=0)
    assert f"critic's gradients: {2_643_584 - 271 * 128:,} x 4" in text
    assert "GPUs: 2," in text
    text = printed(capsys, "+recipe=ppo_moe_r3", "critic.placement=own", CUDA, status=0)
    assert "GPUs: 3," in text and "critic's" not in text.partition("memory of a policy")[2]


def test_optimizer_state_is_shared_out_over_the_ranks_with_the_same_parameters() -> None:
    def optimizer(**sizes: int) -> int:
        layout = [f"+policy.parallel.{name}={size}"[1:] for name, size in sizes.items()]
        config = compose(["model=Qwen3-30B-A3B", *layout])
        terms = states(config, count(config, QWEN3, 0), 2)
        return {term.name: term.nbytes for term in terms}["optimizer"]

    dense, experts = 30_532_122_624 - 28_991_029_248, 28_991_029_248
    assert optimizer() == 12 * (dense + experts)
    assert optimizer(dp=8) == 12 * (dense + experts) // 8
    assert optimizer(dp=8, ep=8) == 12 * (dense // 8 + experts // 8)
    assert optimizer(dp=8, ep=4) == 12 * (dense // 8 + experts // 4 // 2)
    assert optimizer(dp=2, cp=2) == 12 * (dense + experts) // 4


def test_what_the_head_keeps_is_counted_once_and_where_a_backward_pass_follows() -> None:
    def kept(gib: float, stage: int, counted: Any = passes) -> int:
        config = compose([RECIPE, f"policy.kept_softmax_gib={gib}"])
        terms = counted(config, QWEN3, stage, 2)
        return sum(term.nbytes for term in terms if term.name == "kept probabilities")

    config = compose([RECIPE])
    last = config.policy.parallel.pp - 1
    everything = config.policy.max_tokens_per_micro_batch * 151_936 * 2
    assert kept(0.0, last) == 0
    assert kept(0.5, last) == GIB // 2 < everything
    assert kept(1000.0, last) == everything // config.policy.parallel.tp
    assert kept(0.5, last, scoring) == 0
    assert last == 0 or kept(0.5, 0) == 0


def test_how_many_micro_batches_wait() -> None:
    def waiting(stage: int, micro_batches: int, **sizes: int) -> int:
        layout = [f"policy.parallel.{name}={size}" for name, size in sizes.items()]
        return micro_batches_in_flight(compose(layout).policy, stage, micro_batches)

    assert [waiting(stage, 9, pp=4) for stage in range(4)] == [4, 3, 2, 1]
    assert [waiting(stage, 2, pp=4) for stage in range(4)] == [2, 2, 2, 1]
    # Of chunks: 2 for each stage that follows, one round of the stages, and the one at work.
    assert [waiting(stage, 8, pp=2, vpp=2) for stage in range(2)] == [5, 3]


def test_what_an_engine_keeps_of_a_token() -> None:
    assert kv_bytes_per_token(QWEN3, 1, 2) == 48 * 2 * 4 * 128 * 2
    assert kv_bytes_per_token(QWEN3, 2, 2) == 48 * 2 * 2 * 128 * 2
    assert kv_bytes_per_token(QWEN3, 8, 2) == 48 * 2 * 1 * 128 * 2  # a head is never cut
    assert kv_bytes_per_token(LATENT, 4, 2) == 27 * (512 + 64) * 2


def test_an_engine_in_fp8_has_half_the_matrices() -> None:
    plain, quantized = (
        engine_memory(compose([RECIPE, f"rollout.quantization={q}"]), QWEN3, 80 * GIB).terms
        for q in ("none", "fp8")
    )
    bf16 = plain[0].nbytes
    rest, matrices = quantized[0].nbytes, quantized[1].nbytes
    assert bf16 == 2 * 15_272_458_240
    assert rest + 2 * matrices == pytest.approx(bf16, rel=1e-3)


def test_it_loads_neither_megatron_nor_vllm() -> None:
    code = (
        "import sys; from rltrain.cli.app import main; "
        f"assert main(['plan', '{RECIPE}', '--gpu-memory-gib=139.8']) == 0; "
        "sys.exit(bool({'megatron', 'vllm', 'ray', 'transformers'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, capture_output=True)
