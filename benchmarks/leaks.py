"""What a long run leaves behind with every step: memory, handles, threads, files, Ray's objects.

    python -m benchmarks.leaks --steps 500 --out build/leaks.json [name=value ...]

    python -m benchmarks.leaks --of build/leaks.json      the table of samples that were kept

Runs the tiny recipe in processes of its own and looks at them from outside after each step. The
slopes are of the steps after ``--after``, with 95 % intervals (`benchmarks.leak_slopes`). As root
the run gets a /dev/shm of its own, so that no other run of the machine is counted.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.leak_samples import Sample, Watcher
from benchmarks.leak_slopes import Slope, slope_of

ROOT = Path(__file__).parents[1]
STEP_LIMIT_S = 1200.0
KEEP_EVERY = 25
"""Steps after which the samples are written anew."""
Samples = dict[int, Sample]
"""By step."""
OVERRIDES = (
    "cluster.device=cpu",
    "model.tiny.num_layers=2",
    "model.tiny.hidden_size=64",
    "model.tiny.expert_size=64",
    "model.tiny.warm_start.steps=5",
    "model.tiny.warm_start.batch_size=32",
    "model.tiny.warm_start.num_problems=200",
    "data.size=200",
    "data.eval_size=8",
    "algorithm.group_size=2",
    "trainer.prompts_per_step=4",
    "trainer.mini_batches=1",
    "trainer.eval_every=10",
    "checkpoint.every=10",
    "tracking.backends=[]",
)
FEWEST = {"uss_bytes": 2**20, "shm_bytes": 2**20, "ray_pinned_bytes": 2**16}
"""Growth over all the steps that counts: an allocator's arenas and caches fill in jumps. Of what is
counted one by one: 2."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--after", type=int, default=50)
    parser.add_argument("--recipe", default="grpo_moe_r3")
    parser.add_argument("--out", type=Path, help="keeps the samples, also of a run that is ended")
    parser.add_argument("--of", type=Path)
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    if options.of is not None:
        kept = json.loads(options.of.read_text())["samples"]
        samples: Samples = {int(step): sample for step, sample in kept.items()}
    else:
        samples = watch_run(options.steps, options.recipe, options.overrides, options.out)
    print(f"{len(samples)} samples, to step {max(samples)}\n")
    print(table(slopes_of(samples, options.after)))


def watch_run(
    steps: int, recipe: str, overrides: Sequence[str], out: Path | None = None
) -> Samples:
    """Samples by the step after which they were taken."""
    with tempfile.TemporaryDirectory(prefix="leaks-") as folder:
        work = Path(folder)
        (work / "tmp").mkdir()
        command = [sys.executable, "-m", "rltrain.main", f"+recipe={recipe}", *OVERRIDES]
        command += [f"trainer.steps={steps}", f"trainer.output_dir={work / 'run'}"]
        command += [f"model.cache_dir={work / 'models'}", *overrides]
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "TMPDIR": str(work / "tmp"), "PYTHONPATH": path}
        with (work / "log").open("w") as log:
            run = subprocess.Popen(
                [*own_shared_memory(), *command],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=work,
                start_new_session=True,
            )
        try:
            found = _samples(run, work, out)
            if run.wait() != 0:
                raise RuntimeError(f"the run ended with {run.returncode}:\n{_end_of(work)}")
        finally:
            if run.poll() is None:
                os.killpg(run.pid, signal.SIGKILL)
                run.wait()
        return found


def own_shared_memory() -> list[str]:
    """What precedes a command so that it sees an empty /dev/shm; nothing where that needs root."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        return []
    mounted = 'mount -t tmpfs -o mode=1777 tmpfs /dev/shm && exec "$@"'
    return ["unshare", "--mount", "sh", "-c", mounted, "sh"]


def _samples(run: subprocess.Popen[bytes], work: Path, out: Path | None) -> Samples:
    watcher = Watcher(run.pid, work / "tmp")
    found: Samples = {}
    seen, changed = 0, time.monotonic()
    while run.poll() is None:
        time.sleep(0.05)
        rows = _rows(work / "run" / "metrics.jsonl")
        if rows > seen:
            seen, changed = rows, time.monotonic()
            found[rows - 1] = watcher.sample()  # the first row is of step 0
            if rows % KEEP_EVERY == 1:
                print(f"step {rows - 1}", file=sys.stderr, flush=True)
                _keep(found, out)
        if time.monotonic() - changed > STEP_LIMIT_S:
            raise RuntimeError(f"no step for {STEP_LIMIT_S:.0f} s:\n{_end_of(work)}")
    _keep(found, out)
    return found


def _keep(samples: Samples, out: Path | None) -> None:
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps({"samples": samples}) + "\n")


def _rows(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.is_file() else 0


def _end_of(work: Path) -> str:
    return (work / "log").read_text(errors="replace")[-3000:]


def slopes_of(samples: Samples, after: int) -> dict[tuple[str, str], Slope]:
    """By role and what was measured; of those that were there in all the steps."""
    steps = [step for step in sorted(samples) if step > after]
    first = samples[steps[0]]
    found = {}
    for role, names in first.items():
        for name in names:
            values = [samples[step].get(role, {}).get(name) for step in steps]
            if None not in values:
                found[role, name] = slope_of(
                    steps, [value for value in values if value is not None]
                )
    return found


def is_leak(name: str, slope: Slope) -> bool:
    return slope.grows and slope.growth >= FEWEST.get(name, 2)


def table(slopes: Mapping[tuple[str, str], Slope]) -> str:
    """Markdown; what never changed is counted in one line."""
    lines = ["| role | measured | per step | 95 % interval | growth | |", "|" + "---|" * 6]
    still = 0
    for (role, name), slope in sorted(slopes.items()):
        if slope.value == slope.low == slope.high == slope.growth == 0:
            still += 1
            continue
        verdict = "**grows**" if is_leak(name, slope) else ""
        interval = f"{slope.low:.4g} to {slope.high:.4g}"
        lines.append(
            f"| {role} | {name} | {slope.value:.4g} | {interval} | {slope.growth:.4g} | {verdict} |"
        )
    return "\n".join([*lines, "", f"{still} others never changed."])


if __name__ == "__main__":
    main()
