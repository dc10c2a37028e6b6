"""Says whether the environment that runs this file can run rltrain on CPU; exits 1 if not.

PyPI's torch is a CUDA build of several GB; this is the check that it never slips in.
"""

import importlib
import os
import sys

os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")

MODULES = (
    "vllm",
    "megatron.core",
    "ray",
    "hydra",
    "pydantic",
    "transformers",
    "datasets",
    "torchdata.stateful_dataloader",
    "math_verify",
    "reasoning_gym",
    "wandb",
    "rich",
)


def main() -> None:
    import torch

    if torch.version.cuda is not None:
        sys.exit(
            f"expected the CPU build of torch, found {torch.__version__} in {torch.__path__[0]}; "
            "remove .venv and run `make setup` again"
        )
    for name in MODULES:
        try:
            importlib.import_module(name)
        except Exception as error:
            sys.exit(
                f"cannot import {name}: {error!r}; remove .venv and run `make setup` again, "
                "and if it stays so the lock file lacks a package"
            )


if __name__ == "__main__":
    main()
