"""Commands that take a configuration: train on it, or say what it needs."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from rltrain.cli.parameters import OVERRIDES, ConfigDir, Overrides, listed
from rltrain.cli.plan_nodes import AskedNodes, PlanCommand

commands = typer.Typer()
PANEL = "Train"
ARGUMENTS = "rltrain.arguments"
"""Where a context keeps the words after ``rltrain train``."""


class TrainCommand(TyperCommand):
    """Its help also lists recipes and groups, those in ``--config-dir`` too."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        asks = [arg for arg in args if arg in ctx.help_option_names]
        if asks or not (args or ctx.resilient_parsing):
            args = [*(arg for arg in args if arg not in asks), ctx.help_option_names[0]]
        ctx.meta[ARGUMENTS] = list(args)
        return super().parse_args(ctx, args)

    def get_help(self, ctx: Any) -> str:
        from rltrain.config.hydra_groups import describe_groups, find_groups

        shown = super().get_help(ctx)
        return shown + describe_groups(find_groups(ctx.params.get("config_dir")))


@commands.command(
    **listed(
        "rltrain init my_run",
        "rltrain init my_run --model /models/my-qwen3-moe --data train.jsonl --gpus 8",
        panel=PANEL,
    )
)
def init(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="New or empty.")],
    model: Annotated[
        str | None, typer.Option(help="A local Hugging Face folder. Default: the tiny model.")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="Your data: JSONL, Parquet or a dataset folder.")
    ] = None,
    reward: Annotated[
        str | None, typer.Option(help="exact, math_verify, or your function: file.py:score.")
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(help="How many GPUs the run uses. Default: the CPU.")
    ] = None,
    recipe: Annotated[str | None, typer.Option(help="Build on one of rltrain's recipes.")] = None,
) -> int:
    """Write a new FOLDER with a recipe, a reward function, its test and data."""
    from rltrain.cli.init_command import init
    from rltrain.cli.init_recipe import Choices

    return init(folder, Choices(model, data, reward, gpus, recipe))


@commands.command(
    cls=TrainCommand,
    **listed(
        "rltrain train +recipe=grpo_moe_r3 trainer.steps=5",
        "rltrain train recipe.yaml trainer.steps=5",
        panel=PANEL,
    ),
)
def train(
    context: typer.Context,
    overrides: Annotated[list[str] | None, OVERRIDES] = None,
    cfg: Annotated[
        Literal["job"] | None,
        typer.Option(help="Print the resolved configuration and stop.", show_default=False),
    ] = None,
    config_dir: ConfigDir = None,
) -> int:
    """Train. The run's folder is trainer.output_dir."""
    from rltrain.main import train

    return train(overrides or [], config_dir, context.meta[ARGUMENTS], show=cfg is not None)


@commands.command(**listed("rltrain data recipe.yaml", panel=PANEL))
def data(overrides: Overrides, config_dir: ConfigDir = None) -> int:
    """Show the data as the model sees them, and try the reward. Nothing starts."""
    from rltrain.main import compose

    config = compose(overrides, config_dir)  # a mistake in it is said before the rest is imported
    from rltrain.cli.data_command import data

    return data(config)


@commands.command(
    cls=PlanCommand,
    **listed(
        "rltrain plan +recipe=grpo_qwen3_30b_a3b_8gpu --gpus 8",
        "rltrain plan +recipe=grpo_qwen3_30b_a3b_32gpu --nodes 4x8",
        "rltrain plan recipe.yaml --cluster",
        panel=PANEL,
    ),
)
def plan(
    overrides: Overrides,
    gpus: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="How many there are, on nodes of 8; with --nodes N, on each. Default: as many as "
            "it takes.",
        ),
    ] = None,
    nodes: Annotated[
        str | None,
        typer.Option(
            metavar="N|NxGPUS,...",
            help="So many nodes, as in 4 or 4x8,2x4. With cluster.device=cpu, CPUs instead.",
        ),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="[ADDRESS]",
            help="Plan on what is free on the nodes of a running Ray cluster. Default: that of "
            "cluster.address, or the one that Ray finds here.",
        ),
    ] = None,
    gpu_memory_gib: Annotated[
        float, typer.Option(min=1.0, help="Of each GPU. The default is an H100's.")
    ] = 79.2,
    config_dir: ConfigDir = None,
) -> int:
    """Show placement, batch and memory. Nothing starts."""
    from rltrain.main import compose

    config = compose(overrides, config_dir)  # a mistake in it is said before the rest is imported
    from rltrain.cli.plan_command import plan

    return plan(config, AskedNodes(gpus, nodes, cluster), gpu_memory_gib)


@commands.command(
    **listed("rltrain doctor +recipe=grpo_moe_r3", "rltrain doctor --self-test", panel=PANEL)
)
def doctor(
    overrides: Annotated[list[str] | None, OVERRIDES] = None,
    self_test: Annotated[
        bool,
        typer.Option(
            "--self-test", help="Also train the tiny model for two steps and check what must hold."
        ),
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
    cluster: Annotated[
        str | None,
        typer.Option(
            "--cluster",
            metavar="ADDRESS",
            help="Also compare every node of this Ray cluster with this machine.",
        ),
    ] = None,
    config_dir: ConfigDir = None,
) -> int:
    """Check this machine, its packages and a configuration."""
    from rltrain.cli.doctor_command import doctor

    return doctor(overrides or [], config_dir, json=json, with_self_test=self_test, cluster=cluster)
