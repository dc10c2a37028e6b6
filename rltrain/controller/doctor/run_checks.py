"""Whether a configuration can run here: what a run checks before it starts, each as a finding."""

from collections.abc import Callable, Iterator

from rltrain.config import Config
from rltrain.controller.checks import preflight
from rltrain.controller.checks.engine_options import check_engine_options
from rltrain.controller.checks.model_checks import (
    check_imported,
    check_layout,
    check_lengths,
    check_replay,
    check_weights,
    read_model,
)
from rltrain.controller.choose_checkpoint import check_resumed
from rltrain.controller.doctor.findings import Finding, fail, not_applicable, ok, remedy_of
from rltrain.controller.run_data import RunData, check_folder_tokenizer, examine
from rltrain.planning.machine import check_ranks, count_cores, count_gpus, device
from rltrain.weights.architecture.decoder import Architecture

NAMES = ("model", "data and reward", "chat template", "layout", "weights", "output folder")
REMEDY = "correct what the message names; rltrain train would stop with the same message"


def check_run(config: Config) -> Iterator[Finding]:
    """One finding per area, in the order in which a run checks them."""
    try:
        model = read_model(config)
        check_lengths(config, model)
        check_engine_options(config)
        if config.algorithm.type == "rl":
            check_replay(config, model)
            preflight.check_engines(config, model)
    except ValueError as error:
        yield fail("model", str(error), remedy_of(str(error), REMEDY))
        for name in NAMES[1:]:
            yield not_applicable(name, "the model cannot be used")
        return
    yield ok("model", describe_model(config, model))
    yield from _check_data(config, model)
    yield _passes("layout", "every rank has a place", lambda: _check_layout(config, model))
    if config.model.path is None:
        yield not_applicable("weights", "the tiny model is built when a run starts")
    else:
        path = config.model.path
        yield _passes(
            "weights",
            f"{path}: complete by their headers",
            lambda: check_weights(path, model),
            lambda: check_imported(config.model, trust=config.checkpoint.trust),
        )
    yield _passes(
        "output folder",
        config.trainer.output_dir,
        lambda: preflight.check_earlier_run(config),
        lambda: check_resumed(config, model),
    )


def describe_model(config: Config, model: Architecture) -> str:
    kind = (
        f"{model.num_experts} experts, {model.experts_per_token} per token"
        if model.num_experts
        else "dense"
    )
    return f"{config.model.path or 'tiny'}: {model.family}, {model.num_layers} layers, {kind}"


def _check_data(config: Config, model: Architecture) -> Iterator[Finding]:
    data = examine(config, model)
    if data.fault is None:
        try:
            check_folder_tokenizer(config, data)
        except ValueError as error:
            data.fault = error
    problems = data.problems
    if data.fault is not None:
        yield fail("data and reward", str(data.fault), remedy_of(str(data.fault), REMEDY))
    else:
        yield ok(
            "data and reward",
            f"{len(problems.train)} training and {len(problems.held_out)} held-out problems, "
            f"reward tried on {len(data.trials)}",
        )
    yield _check_template(data, config.model.path)


def _check_template(data: RunData, path: str | None) -> Finding:
    """A missing template is a fault of the data where prompts are messages, and else unused."""
    if data.tokenizer is None:
        return not_applicable("chat template", "no tokenizer was loaded")
    if getattr(data.tokenizer, "chat_template", None):
        return ok("chat template", f"of {path or 'the tiny model'}")
    return not_applicable("chat template", "the tokenizer has none: prompts must be plain text")


def _check_layout(config: Config, model: Architecture) -> None:
    check_layout(config, model)
    if config.cluster.address is None:
        check_ranks(config, device(config.cluster), count_cores(), count_gpus())


def _passes(name: str, found: str, *checks: Callable[[], object]) -> Finding:
    try:
        for check in checks:
            check()
    except ValueError as error:
        return fail(name, str(error), remedy_of(str(error), REMEDY))
    return ok(name, found)


def output_parent(config: Config) -> str:
    """The fixed part of ``trainer.output_dir``, which may end in a time."""
    fixed, time, _ = config.trainer.output_dir.partition("%")
    return (fixed.rpartition("/")[0] or ".") if time else fixed
