"""``rltrain data``: the data of a run as the model would see it. No GPU, no Ray, no engine."""

import logging
import sys

from rltrain.config import Config
from rltrain.controller.checks.model_checks import check_lengths, read_model
from rltrain.controller.run_data import RunData, check_folder_tokenizer, examine

NUM_SHOWN = 3


def data(config: Config) -> int:
    """Print what was found of data, tokenizer and reward; the exit status is 1 when a run with this
    configuration could not use them.
    """
    from rltrain.cli.data_text import print_data

    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    run_data = examine_data(config)
    print_data(config, run_data, NUM_SHOWN)
    sys.stdout.flush()
    if run_data.fault is None:
        sys.stdout.write("usable as configured\n")
        return 0
    sys.stderr.write(f"rltrain data: not usable as configured\n  {run_data.fault}\n")
    return 1


def examine_data(config: Config) -> RunData:
    """What preflight examines of the data, and the fault that it would raise."""
    run_data = RunData()
    try:
        model = read_model(config)
        check_lengths(config, model)
        run_data = examine(config, model, NUM_SHOWN)
        if run_data.fault is None:
            check_folder_tokenizer(config, run_data)
    except ValueError as error:
        run_data.fault = error
    return run_data
