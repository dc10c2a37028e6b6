"""Carry out what is planned, and compare it with a run that nothing happens to."""

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.chain import Chain
from tests.chaos.outcome import is_same, seconds_of_phases
from tests.chaos.plan import REWARD, SMALL, SMALL_DISK_MIB, STEPS, Planned


@dataclass
class Reference:
    """Runs that nothing happens to, one for each set of overrides.

    Args:
        folder: for all runs
    """

    folder: Path
    _runs: dict[tuple[str, ...], Path] = field(default_factory=dict)

    def __post_init__(self) -> None:
        (self.folder / "chaos_reward.py").write_text(REWARD)

    def of(self, overrides: tuple[str, ...]) -> Path:
        """The folder of the run with these."""
        if overrides not in self._runs:
            chain = Chain((), self.command(overrides), self.new_folder())
            chain.execute()
            self._runs[overrides] = chain.run
        return self._runs[overrides]

    def command(self, overrides: Sequence[str]) -> list[str]:
        cache = f"model.cache_dir={self.folder / 'models'}"
        return [*SMALL, f"trainer.steps={STEPS}", cache, *overrides]

    def new_folder(self) -> Path:
        folder = self.folder / str(len(list(self.folder.glob("[0-9]*"))))
        folder.mkdir()
        return folder


def execute(planned: Planned, reference: Reference) -> Chain:
    """Run it to its end; what became of each fault is in ``rows`` of the chain. ``failure`` says
    why it did not come to its end, and is empty otherwise."""
    undisturbed = reference.of(planned.overrides)
    phase_s = seconds_of_phases(undisturbed)
    command = reference.command(planned.overrides)
    chain = Chain(planned.faults, command, reference.new_folder(), phase_s)
    if planned.has_small_disk:
        chain.run.mkdir()
        size = f"size={SMALL_DISK_MIB}m"
        subprocess.run(["mount", "-t", "tmpfs", "-o", size, "none", str(chain.run)], check=True)
    try:
        chain.execute()
        same = is_same(chain.run, undisturbed, reference.folder)
    except (RuntimeError, LookupError) as error:
        chain.failure = f"{type(error).__name__}: {error}"
        return chain
    finally:
        if planned.has_small_disk:
            subprocess.run(["umount", "--lazy", str(chain.run)], check=True)
    for row in chain.rows:
        row.bitwise = same
    return chain
