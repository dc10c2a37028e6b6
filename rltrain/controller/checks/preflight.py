"""What must be true of files and machine before anything starts: the checks, in their order.

Each check raises ``ValueError`` with what was expected, what was found and what to do.
"""

import os
import tempfile
from pathlib import Path

from rltrain.actors.run_lock import unwritable
from rltrain.config import Config
from rltrain.config.algorithm import AlgorithmConfig
from rltrain.config.saved_config import NAME as CONFIG_FILE
from rltrain.controller.checks.engine_guards import (
    check_capture_options,
    check_capture_version,
    check_engine,
    check_logits_processors,
)
from rltrain.controller.checks.engine_options import check_engine_options
from rltrain.controller.checks.engine_shapes import check_engine_shapes, check_tensor_parallel
from rltrain.controller.checks.model_checks import (
    check_imported,
    check_layout,
    check_lengths,
    check_replay,
    check_weights,
    read_model,
)
from rltrain.controller.choose_checkpoint import check_resumed
from rltrain.controller.keep_best import check_best
from rltrain.controller.remote_records import check_url
from rltrain.controller.run_checkpoint import candidates_here
from rltrain.controller.run_data import RunData, check_folder_tokenizer, examine
from rltrain.planning.compiler import check_compiler
from rltrain.planning.machine import check_ranks, count_cores, count_gpus, device
from rltrain.tracking.backends import check_packages
from rltrain.tracking.wandb_mode import check_login
from rltrain.weights.architecture.decoder import Architecture


def preflight(config: Config) -> RunData:
    """Run the checks that concern ``config``; the output folder comes last and is created.

    What is quick and needs little comes first. What needs torch comes after the data.

    Returns:
        the data as they were read and checked, for the run to go on with.
    """
    model = read_model(config)
    check_layout(config, model)
    check_lengths(config, model)
    check_earlier_run(config)
    check_best(config)
    check_engine_options(config)
    check_packages(config.tracking)
    check_login(config.tracking, os.environ)
    if config.algorithm.type == "rl":
        check_replay(config, model)
        check_engines(config, model)
    data = examine(config, model)
    if data.fault is not None:
        raise data.fault
    if config.algorithm.type == "rl":
        check_algorithm(config.algorithm)
    if config.cluster.address is None:
        check_ranks(config, device(config.cluster), count_cores(), count_gpus())
    check_folder_tokenizer(config, data)
    if config.model.path is not None:
        check_weights(config.model.path, model)
    joined = config.cluster.address is not None
    check_imported(config.model, joined=joined, trust=config.checkpoint.trust)
    check_url(config)
    check_resumed(config, model)
    check_output(config)
    return data


def check_engines(config: Config, model: Architecture) -> None:
    """The installed vLLM can generate with the model, here or, as far as known, in the cluster."""
    if config.cluster.address is None:
        check_engine_shapes(config, model, device(config.cluster))
        if device(config.cluster) == "cpu":
            check_compiler(os.environ)
    else:
        check_tensor_parallel(config.rollout, model)
    name, version = check_engine()
    check_logits_processors()
    if config.routing_replay.capture:
        check_capture_version(name, version)
        check_capture_options(
            config.rollout.engine_args,
            {**os.environ, **{name: str(value) for name, value in config.cluster.env.items()}},
            device(config.cluster),
            version,
        )


def check_algorithm(algorithm: AlgorithmConfig) -> None:
    """There are such an advantage and such a loss, and they have what they need."""
    # These need torch, which takes seconds: imported here, and called after what is quick.
    from rltrain.algorithms.advantages import find_advantage
    from rltrain.algorithms.losses import find_loss

    find_loss(algorithm.loss)
    if find_advantage(algorithm.advantage).compares and algorithm.group_size < 2:
        raise ValueError(
            f"algorithm.advantage={algorithm.advantage} compares the responses to a prompt, and "
            f"algorithm.group_size={algorithm.group_size} gives it nothing to compare one with: "
            "use 2 or more"
            " [RL1003]"
        )


def check_earlier_run(config: Config) -> None:
    """The output folder holds no other run."""
    folder = Path(config.trainer.output_dir)
    found = (folder / CONFIG_FILE).exists() or candidates_here(folder)
    if found and not config.trainer.resumes:
        raise ValueError(
            f"trainer.output_dir={folder}: expected a new or empty folder, found an earlier run. "
            "Set trainer.resume=auto to go on with it, or choose another folder"
            " [RL6002]"
        )


def check_output(config: Config) -> None:
    """The output folder can be written; it is created."""
    folder = Path(config.trainer.output_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"1")  # an empty file fits on a full disk
    except OSError as error:
        raise unwritable(folder, error) from error
