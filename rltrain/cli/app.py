"""The console script ``rltrain``: one command per entry of ``COMMANDS``.

A command's module is imported when the command runs, so that ``rltrain keys`` loads no torch.
"""

import os
import sys
import warnings
from collections.abc import Callable, Sequence

from rltrain.config.reference import keys, show

Arguments = Sequence[str]


def _train(arguments: Arguments) -> int:
    """Train: +recipe=NAME [name=value ...]; the same as python -m rltrain.main."""
    from rltrain.main import main as run

    return run(arguments)


def _init(arguments: Arguments) -> int:
    """Write a new FOLDER with a recipe, a reward function, its test and data: rltrain init -h."""
    from rltrain.cli.init_command import init as run

    return run(arguments)


def _list_keys(arguments: Arguments) -> int:
    """List the configuration keys that contain WORD, with their types and defaults."""
    word = arguments[0] if arguments else ""
    for key in keys():
        if word in key.name:
            sys.stdout.write(f"{key.name}={show(key.default)}  ({key.type})\n")
            if key.doc:
                sys.stdout.write(f"    {' '.join(key.doc.split())}\n")
    return 0


def _import(arguments: Arguments) -> int:
    """Write a Hugging Face FOLDER as a checkpoint of Megatron's, OUT: rltrain import -h."""
    _ignore_import_warnings()
    from rltrain.cli.convert_command import import_command as run

    return run(arguments)


def _export(arguments: Arguments) -> int:
    """Write a checkpoint of a run, or an imported one, as a Hugging Face folder OUT."""
    _ignore_import_warnings()
    from rltrain.cli.convert_command import export_command as run

    return run(arguments)


def _report(arguments: Arguments) -> int:
    """Write the report of RUN anew from the files in its folder."""
    from rltrain.cli.report_command import report as run

    return run(arguments)


def _plan(arguments: Arguments) -> int:
    """Show placement, batch and memory of +recipe=NAME [name=value ...]; nothing starts."""
    from rltrain.cli.plan_command import plan as run

    return run(arguments)


def _data(arguments: Arguments) -> int:
    """Show the data of +recipe=NAME [name=value ...] as the model sees them; nothing starts."""
    from rltrain.cli.data_command import data as run

    return run(arguments)


def _verify(arguments: Arguments) -> int:
    """Compare every parallel layout with one rank on this machine: [--full] [--only TEXT]."""
    _ignore_import_warnings()
    from rltrain.verification.verify_command import verify_layouts as run

    return run(arguments)


def _routes(arguments: Arguments) -> int:
    """Record, replay, compare, inspect or slice routes outside of a run: rltrain routes -h."""
    _ignore_import_warnings()
    from rltrain.verification.routes_command import routes as run

    return run(arguments)


def _ignore_import_warnings() -> None:
    """Megatron's, about packages it can do without; in this process and in its ranks."""
    os.environ.setdefault("PYTHONWARNINGS", "ignore::UserWarning,ignore::FutureWarning")
    warnings.simplefilter("ignore", UserWarning)


def _bench(arguments: Arguments) -> int:
    """Say what became worse between two results of benchmarks/: compare OLD NEW."""
    from rltrain.cli.bench_command import bench as run

    return run(arguments)


def _doctor(arguments: Arguments) -> int:
    """Check this machine, its packages and a configuration: [+recipe=NAME ...] [--self-test]."""
    from rltrain.cli.doctor_command import doctor as run

    return run(arguments)


def _dashboard(arguments: Arguments) -> int:
    """Save the dashboard as a view of the wandb project ENTITY/PROJECT."""
    from rltrain.cli.report_command import dashboard as run

    return run(arguments)


COMMANDS: dict[str, Callable[[Arguments], int]] = {
    "init": _init,
    "train": _train,
    "report": _report,
    "import": _import,
    "export": _export,
    "keys": _list_keys,
    "data": _data,
    "plan": _plan,
    "verify": _verify,
    "routes": _routes,
    "bench": _bench,
    "doctor": _doctor,
    "dashboard": _dashboard,
}
"""Name -> function of the arguments after the name; its docstring is the help."""


def main(argv: Arguments | None = None) -> int:
    """Run the command that ``argv`` names; the exit status is 2 when there is no such command."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        sys.stdout.write(usage())
        return 0
    if arguments[0] not in COMMANDS:
        sys.stderr.write(f"rltrain: there is no command {arguments[0]}\n\n{usage()}")
        return 2
    try:
        return COMMANDS[arguments[0]](arguments[1:])
    except (ValueError, RuntimeError) as error:
        sys.stderr.write(f"rltrain {arguments[0]}: {error}\n")
        return 2


def usage() -> str:
    lines = "\n".join(
        f"  {name:<10} {(command.__doc__ or '').splitlines()[0]}"
        for name, command in COMMANDS.items()
    )
    return f"usage: rltrain COMMAND ...\n\ncommands:\n{lines}\n"


if __name__ == "__main__":
    sys.exit(main())
