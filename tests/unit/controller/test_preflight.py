"""What is checked before anything starts says what was expected, found, and what to do."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rltrain.config import Config
from rltrain.controller.checks.model_checks import check_imported, check_layout, read_model
from rltrain.controller.checks.preflight import check_earlier_run, check_output, preflight
from rltrain.data.tiny_model import tiny_config
from rltrain.data.tokenizer import VOCAB_SIZE, tiny_tokenizer
from rltrain.main import compose, main, start_folder
from rltrain.planning.machine import check_ranks, device
from rltrain.weights.families import architecture_from_config
from rltrain.weights.huggingface.manifest import write_manifest
from rltrain.weights.huggingface.stored_model import StoredModel
from rltrain.weights.huggingface.torch_dist import write_torch_dist

ROOT = Path(__file__).parents[3]
MOE = read_model(Config())


def with_layout(policy: dict[str, Any] | None = None, **sizes: Any) -> Config:
    """``sizes`` are of the layout, or sections of the configuration."""
    layout = {name: size for name, size in sizes.items() if isinstance(size, int)}
    sections = {name: section for name, section in sizes.items() if name not in layout}
    return Config.model_validate({"policy": {"parallel": layout, **(policy or {})}, **sections})


def save_dense_model(folder: Path) -> None:
    sizes = {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 128,
        "vocab_size": VOCAB_SIZE,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        "max_position_embeddings": 128,
    }
    names = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    tiny_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(names | sizes))


def test_the_main_recipe_passes_and_gets_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "run"
    preflight(compose(["+recipe=grpo_moe_r3", f"trainer.output_dir={folder}"]))
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "answer"),
    [
        ("model.path={}/none", "none does not exist"),
        ("model.path={}", "no config.json"),
        ("data=jsonl data.path={}/none.jsonl", "there is no file or folder {}/none.jsonl"),
        ("data.reward.function=no_such_module.score", "No module named 'no_such_module'"),
        ("policy.parallel.dp=512 trainer.prompts_per_step=256", "expected at most 4 ranks a core"),
        ("data.max_prompt_tokens=2040", "expected together at most the 2048 positions"),
        ("rollout.quantization=fp8", "fp8: expected a GPU, found cluster.device=cpu"),
        ("trainer.output_dir={}/file/run", "expected a folder that can be written"),
    ],
)
def test_bad_input_ends_the_program_at_once(
    change: str, answer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    folder = f"trainer.output_dir={tmp_path}/run"
    overrides = change.format(tmp_path, tmp_path).split()
    changes = ["+recipe=grpo_moe_r3", "cluster.device=cpu", folder, *overrides]
    assert main(changes) == 2
    assert answer.format(tmp_path) in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("change", "answer"),
    [
        ("tracking.backends=[mlflow]", "pip install 'rltrain[mlflow]'"),
        ("tracking.backends=[tensorboard]", "pip install 'rltrain[tensorboard]'"),
        ("tracking.wandb=online", "expected a login to wandb"),
    ],
)
def test_a_tracker_that_cannot_run_ends_the_program_at_once(
    change: str,
    answer: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_IDENTITY_TOKEN_FILE", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    if "wandb" not in change:  # as if it were not installed
        monkeypatch.setattr("rltrain.tracking.backends.find_spec", lambda name: None)
    run = f"trainer.output_dir={tmp_path}/run"
    with pytest.raises(ValueError, match=re.escape(answer)):
        preflight(compose(["+recipe=grpo_moe_r3", "cluster.device=cpu", run, change]))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("mode", ["r2", "r3"])
def test_a_dense_model_has_nothing_to_replay(mode: str, tmp_path: Path) -> None:
    save_dense_model(tmp_path)
    model = f"model.path={tmp_path}"
    folder = f"trainer.output_dir={tmp_path}/run"
    with pytest.raises(ValueError, match=rf"mode={mode}.*expected a model with routers.*dense"):
        preflight(compose([f"routing_replay={mode}", model, folder]))
    with pytest.raises(ValueError, match="capture=true: expected a model with routers"):
        preflight(compose([model, folder]))
    # Nothing is left to refuse but that the folder holds no weights.
    with pytest.raises(ValueError, match=r"has neither model\.safetensors nor"):
        preflight(compose([model, folder, "routing_replay.capture=false"]))


def test_the_layout_divides_the_model() -> None:
    check_layout(with_layout(tp=2, dp=4, ep=8), MOE)
    with pytest.raises(ValueError, match="tp=4: expected a divisor of the 2 key-value heads"):
        check_layout(with_layout(tp=4), MOE)
    with pytest.raises(ValueError, match="tp=8: expected a divisor of the 4 attention heads"):
        check_layout(with_layout(tp=8), MOE)
    with pytest.raises(ValueError, match=r"ep=64: .* found 32 experts"):
        check_layout(with_layout(dp=64, ep=64), MOE)
    with pytest.raises(ValueError, match=r"ep=2: .* found 0 experts"):
        check_layout(with_layout(dp=2, ep=2), replace(MOE, num_experts=0))
    with pytest.raises(ValueError, match=r"etp=32: expected a divisor of the experts'.* found 48"):
        check_layout(with_layout(dp=32, etp=32), MOE)


def test_stages_share_out_the_layers() -> None:
    check_layout(with_layout(pp=2, vpp=2), MOE)
    check_layout(with_layout(pp=2, first_stage_layers=1), MOE)
    with pytest.raises(ValueError, match=r"policy\.parallel\.pp=3"):
        check_layout(with_layout(pp=3), MOE)
    with pytest.raises(ValueError, match=r"policy\.parallel\.vpp=4"):
        check_layout(with_layout(pp=2, vpp=4), MOE)


def test_recomputation_fits_every_chunk() -> None:
    twice = {"recompute": "full", "recompute_num_layers": 2}
    check_layout(with_layout(twice, pp=2), MOE)
    with pytest.raises(ValueError, match="recompute_num_layers=2: expected a divisor of the 1"):
        check_layout(with_layout(twice, pp=2, vpp=2), MOE)
    check_layout(with_layout(twice | {"recompute_method": "block"}, pp=2, vpp=2), MOE)


def test_the_tiny_model_is_what_transformers_builds() -> None:
    tiny = {"num_layers": 3, "hidden_size": 64, "num_heads": 8, "head_dim": 64, "expert_size": 32}
    for sizes in ({}, tiny):
        config = Config.model_validate({"model": {"tiny": sizes}})
        built = tiny_config(config.model.tiny).to_diff_dict()
        assert read_model(config) == architecture_from_config(built, "the tiny model")


def test_ranks_fit_the_cores() -> None:
    check_ranks(with_layout(dp=4, rollout={"num_engines": 4}), "cpu", cores=2, gpus=0)
    with pytest.raises(ValueError, match=r"8 on 2 cores, found 9.*1\*1\*1\*8 = 8 policy ranks"):
        check_ranks(with_layout(dp=8), "cpu", cores=2, gpus=0)


def test_supervised_steps_need_no_engine_rank() -> None:
    check_ranks(with_layout(dp=8, algorithm={"type": "sft"}), "cpu", cores=2, gpus=0)


def test_weights_have_a_way_to_the_engines() -> None:
    ipc, broadcast = ({"weight_transfer": transport} for transport in ("ipc", "broadcast"))
    check_ranks(with_layout(rollout=broadcast), "cpu", cores=2, gpus=0)
    with pytest.raises(ValueError, match=r"weight_transfer=ipc: .* found a run on CPUs"):
        check_ranks(with_layout(rollout=ipc), "cpu", cores=2, gpus=0)
    check_ranks(with_layout(rollout=ipc), "cuda", cores=1, gpus=1)
    with pytest.raises(ValueError, match=r"weight_transfer=broadcast: .* some that share"):
        check_ranks(with_layout(rollout=broadcast), "cuda", cores=1, gpus=1)
    check_ranks(with_layout(rollout=broadcast), "cuda", cores=1, gpus=2)
    with pytest.raises(ValueError, match=r"weight_transfer=ipc: .* found engines on GPUs of their"):
        check_ranks(with_layout(rollout=ipc), "cuda", cores=1, gpus=2)


def test_ranks_fit_the_gpus() -> None:
    check_ranks(with_layout(), "cuda", cores=1, gpus=1)
    check_ranks(with_layout(dp=2), "cuda", cores=1, gpus=2)
    check_ranks(with_layout(dp=2, algorithm={"type": "sft"}), "cuda", cores=1, gpus=2)
    with pytest.raises(ValueError, match=r"expected 3 .* found 1: .*= 2 policy ranks"):
        check_ranks(with_layout(dp=2), "cuda", cores=64, gpus=1)
    with pytest.raises(ValueError, match="expected 1 GPUs, found 0"):
        check_ranks(with_layout(), "cuda", cores=64, gpus=0)
    with pytest.raises(ValueError, match="expected 4 GPUs, found 2"):
        check_ranks(with_layout(cluster={"num_gpus": 4}), "cuda", cores=64, gpus=2)
    with pytest.raises(ValueError, match=r"expected 3 .* found 1"):
        check_ranks(with_layout(dp=2, cluster={"num_gpus": 1}), "cuda", cores=64, gpus=4)


def test_a_critics_ranks_count() -> None:
    gae = {"advantage": "gae"}
    check_ranks(with_layout(algorithm=gae), "cpu", cores=1, gpus=0)
    with pytest.raises(ValueError, match=r"4 on 1 cores, found 5: .* 2 policy ranks, as many crit"):
        check_ranks(with_layout(dp=2, algorithm=gae), "cpu", cores=1, gpus=0)


def test_no_visible_gpu_means_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert device(Config().cluster) == "cpu"
    assert device(Config.model_validate({"cluster": {"device": "cuda"}}).cluster) == "cuda"


def test_an_earlier_run_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    config = start_folder(compose([f"trainer.output_dir={tmp_path}"]))
    with pytest.raises(ValueError, match="found an earlier run"):
        check_earlier_run(config)
    (tmp_path / "config.yaml").unlink()
    (tmp_path / "checkpoints/step_000004").mkdir(parents=True)  # all that was left of one
    with pytest.raises(ValueError, match="found an earlier run"):
        check_earlier_run(config)
    check_earlier_run(compose([f"trainer.output_dir={tmp_path}", "trainer.resume=auto"]))
    check_output(config)


def test_imported_weights_are_whole_and_of_the_model(tmp_path: Path) -> None:
    model, weights = tmp_path / "model", tmp_path / "weights"
    for folder in (model, weights / "huggingface"):
        folder.mkdir(parents=True)
        save_dense_model(folder)
    (weights / "policy").mkdir()
    write_torch_dist(weights / "policy", [], StoredModel({}, (), {}), 1)
    config = Config.model_validate({"model": {"path": str(model), "weights": str(weights)}}).model
    with pytest.raises(ValueError, match=r"expected manifest\.json beside"):
        check_imported(config)
    write_manifest(weights)
    check_imported(config)
    plain = (weights / "policy" / ".metadata").read_bytes()
    (weights / "policy" / ".metadata").write_bytes(b"cos\nsystem\n.")
    write_manifest(weights)
    with pytest.raises(ValueError, match=r"it names os\.system.*RL7008"):
        check_imported(config)
    (weights / "policy" / ".metadata").write_bytes(plain)
    write_manifest(weights)
    changed = json.loads((model / "config.json").read_text()) | {"vocab_size": 7}
    (model / "config.json").write_text(json.dumps(changed))
    with pytest.raises(ValueError, match="found the weights of another architecture"):
        check_imported(config)
    (weights / "huggingface" / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"its content is not what manifest\.json says"):
        check_imported(config)
