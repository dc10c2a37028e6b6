"""``rltrain verify``: every parallel layout against one rank, on this machine."""

import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Literal

from rltrain.planning.machine import count_gpus
from rltrain.policy.ranks import RanksFailed, run_ranks
from rltrain.verification.layout_case import LAYOUTS, LayoutCase, whole_product
from rltrain.verification.layout_models import MODELS
from rltrain.verification.layout_row import NATIVE, PERTURBED, RECORDED, Row, read_row, result_file
from rltrain.verification.one_rank_oracle import run_cases, run_reference

TOLERANCE = 1e-4
"""Largest error relative to the largest entry, in fp32. Sums in another order make 1e-6 to 1e-5."""
BF16_LIMIT = 0.1
"""Largest root mean square error in bf16, relative to that of what one rank computes in fp32."""
BF16_FACTOR = 4.0
"""Largest error of a layout in bf16, over that of one rank in bf16. A rank has few of the tokens,
and rows that route natively may choose other experts."""
ROW_TIMEOUT_S = 180.0
ROWS_PER_PROCESS = {"cpu": 6, "cuda": 24}
"""Megatron's wrappers keep a row's model alive, with a hundred gloo threads."""


@dataclass(frozen=True)
class Result:
    """One row's outcome; ``row`` is None where it failed before there were numbers."""

    case: LayoutCase
    row: Row | None
    problem: str

    @property
    def passed(self) -> bool:
        return not self.problem


def verify_layouts(
    *, full: bool = False, only: str = "", models: str | None = None, bf16: bool = False
) -> int:
    """Run the table and print it; 1 when a row failed.

    Args:
        full: every layout with every recomputation and dispatcher that it allows, on all models
        only: what the names of rows must contain
        models: names of `MODELS` with commas between; None is the first, all of them with ``full``
        bf16: parameters in bf16, against one rank in fp32 on the same routes and weights

    Raises:
        ValueError: there is no such model or row.
    """
    cases = _selected_cases(full, only, models, bf16)
    gpus = count_gpus()
    too_large = [case for case in cases if gpus and case.parallel.world_size > gpus]
    cases = [on_gpus(case) if gpus else case for case in cases if case not in too_large]
    device: Literal["cpu", "cuda"] = "cuda" if gpus else "cpu"
    started = time.monotonic()
    results: list[Result] = []

    def report(result: Result) -> None:
        results.append(result)
        sys.stdout.write(result_line(result))
        sys.stdout.flush()

    sys.stdout.write(table_head())
    with tempfile.TemporaryDirectory(prefix="rltrain-verify-") as folder:
        run_layouts(cases, Path(folder), device, report)
    failed = sum(not result.passed for result in results)
    if too_large:
        sys.stdout.write(f"{len(too_large)} layouts need more than {gpus} GPUs: not run\n")
    sys.stdout.write(
        f"{len(results) - failed} of {len(results)} layouts equal one rank "
        f"{_BF16_LIMITS if bf16 else f'within {TOLERANCE:g} of the largest entry'} "
        f"({device}, {time.monotonic() - started:.0f} s)\n"
    )
    return int(failed > 0)


def run_layouts(
    cases: Sequence[LayoutCase],
    folder: Path,
    device: Literal["cpu", "cuda"],
    report: Callable[[Result], None],
) -> None:
    """Run the cases, by world size. One group of processes runs several cases in turn.

    A case that breaks its processes is reported, and new ones run the rest.

    Args:
        folder: empty; the reference and one file a row are written there
    """
    if device == "cuda":
        # Transformer Engine would multiply fp32 in TF32, which rounds to 1e-3.
        os.environ["NVIDIA_TF32_OVERRIDE"] = "0"
        os.environ["TORCHDYNAMO_DISABLE"] = "1"  # compiling takes longer than these models run
    yardsticks = {c.alone.name: alone_in_bf16(c) for c in cases if c.params == "bf16"}
    rows: dict[str, Row] = {}
    by_name = {case.name: case for case in [*yardsticks.values(), *cases]}
    in_order = sorted(by_name.values(), key=lambda case: case.parallel.world_size)
    references = list({c.alone.name: c for c in cases}.values())
    run_ranks(run_reference, 1, folder, references, device, device=device, timeout_s=600)
    for size, group in groupby(in_order, key=lambda case: case.parallel.world_size):
        left = list(group)

        def take_finished(left: list[LayoutCase] = left) -> bool:
            any_finished = False
            while left and (file := result_file(folder, left[0])).exists():
                case, row = left.pop(0), read_row(file)
                rows[case.name] = row
                yardstick = yardsticks.get(case.alone.name, case)
                report(judge_row(case, row, rows.get(yardstick.name)))
                any_finished = True
            return any_finished

        while left:
            try:
                run_ranks(
                    run_cases,
                    size,
                    folder,
                    left[: ROWS_PER_PROCESS[device]],
                    device,
                    device=device,
                    timeout_s=ROW_TIMEOUT_S,
                    on_poll=take_finished,
                )
            except RanksFailed as error:
                if left:
                    report(Result(left.pop(0), None, str(error)))


def alone_in_bf16(case: LayoutCase) -> LayoutCase:
    """One rank in bf16: its error is the measure of the row's."""
    return replace(case.alone, params="bf16")


def on_gpus(case: LayoutCase) -> LayoutCase:
    """With the torch backend for context parallelism in fp32, which Transformer Engine lacks."""
    if case.parallel.cp == 1 or case.params == "bf16":
        return case
    return replace(case, options={**case.options, "transformer_engine": "never"})


def judge_row(case: LayoutCase, row: Row, yardstick: Row | None = None) -> Result:
    """Args: yardstick: of one rank in bf16, for a row in bf16."""
    if case.params == "bf16":
        return Result(case, row, "; ".join(_problems_in_bf16(row, yardstick)))
    problems = [
        f"{name}: {quantity} is off by {error:.1e}"
        + (f" ({row.worst_gradient})" if quantity == "gradient" else "")
        for name, errors in (
            (NATIVE, row.native),
            (RECORDED, row.recorded),
            (PERTURBED, row.perturbed),
        )
        for quantity, error in errors.items()
        if not error <= TOLERANCE
    ]
    if row.wrong_records:
        problems.append(f"{row.wrong_records} recorded experts differ from one rank's")
    return Result(case, row, "; ".join(problems))


def _problems_in_bf16(row: Row, yardstick: Row | None) -> list[str]:
    """Of the passes on recorded and perturbed routes, their logits and gradient.

    Natively, rounding decides which experts a token chooses. The loss has weights of both signs,
    so what is left of it is rounding, too.
    """
    problems = []
    for name in (RECORDED, PERTURBED):
        errors, measure = getattr(row, name), getattr(yardstick or row, name)
        for quantity in ("logits", "gradient"):
            limit = min(BF16_LIMIT, BF16_FACTOR * measure[quantity])
            if not errors[quantity] <= limit:
                problems.append(
                    f"{name}: {quantity} is off by {errors[quantity]:.1e}, limit {limit:.1e}"
                )
    return problems


_BF16_LIMITS = (
    f"in fp32 within {BF16_FACTOR:g} times the error of one in bf16 (root mean square, at most "
    f"{BF16_LIMIT:g})"
)


def table_head() -> str:
    names = [*LAYOUTS[0].cells, *_NUMBERS, ""]
    return "  ".join(name.ljust(_width(name)) for name in names).rstrip() + "\n"


def result_line(result: Result) -> str:
    """One row of the table; a failed row's problem follows below it."""
    cells = dict(result.case.cells)
    if (row := result.row) is not None:
        for name, errors in zip(_NUMBERS, (row.native, row.recorded, row.perturbed), strict=False):
            cells[name] = " ".join(f"{error:.0e}" for error in errors.values())
        cells["records"] = f"{row.wrong_records} wrong"
        cells["consumed"] = f"{row.num_forwards}+{row.num_reruns}"
        cells["s"] = f"{row.seconds:.0f}"
    verdict = "ok" if result.passed else "FAILED"
    names = [*LAYOUTS[0].cells, *_NUMBERS]
    text = "  ".join(cells.get(name, "-").ljust(_width(name)) for name in names)
    problem = "".join(f"    {part}\n" for part in result.problem.splitlines())
    return f"{text}  {verdict}\n{problem}"


_NUMBERS = (
    "native: logits loss grad",
    "recorded routes",
    "perturbed routes",
    "records",
    "consumed",
    "s",
)
"""Errors of logits, loss and the worst gradient; recorded routes that differ from one rank's;
forward and backward consumptions of routes on rank 0 in one pass."""


def _width(name: str) -> int:
    widths = {"model": 14, "recompute": 17, "dispatcher": 10, "pp": 7, "records": 8, "consumed": 9}
    if name in _NUMBERS[:3]:
        return max(len(name), 19)
    return max(len(name), widths.get(name, 3))


def _selected_cases(full: bool, only: str, models: str | None, bf16: bool) -> list[LayoutCase]:
    names = list(MODELS)
    chosen = models.split(",") if models else names if full else names[:1]
    if unknown := sorted(set(chosen) - set(MODELS)):
        raise ValueError(
            f"--models {','.join(unknown)}: expected some of {', '.join(MODELS)} [RL7004]"
        )
    cases = (
        whole_product(chosen)
        if full
        else [replace(case, model=model) for model in chosen for case in LAYOUTS]
    )
    if bf16:
        cases = [replace(case, params="bf16") for case in cases]
    selected = [case for case in cases if only in case.name]
    if not selected:
        raise ValueError(
            f"--only {only!r}: no row has that in its name, as in 'pp=2 vpp=2' [RL7004]"
        )
    return selected
