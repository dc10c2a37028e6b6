"""Which faults meet which runs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from tests.chaos.driver import METRICS
from tests.chaos.faults import DAMAGES, PHASES, PROCESSES, START, Fault
from tests.tiny_run import SIZES, WARM_START

STEPS = 9
FIRST = 2
"""Step of the first fault: a checkpoint precedes it."""
SMALL = (
    "+recipe=ppo_moe_r3",
    *SIZES,
    *WARM_START,
    "data.size=200",
    "data.eval_size=8",
    "data.reward.function=chaos_reward.score",
    "algorithm.group_size=4",
    "rollout=deterministic",
    "optimizer.lr=1e-3",
    "optimizer.warmup_steps=0",
    "trainer.prompts_per_step=4",
    "trainer.mini_batches=2",
    "trainer.eval_every=1",
    "trainer.max_restarts=100",
    "trainer.grace_s=120",
    "checkpoint.every=1",
    "tracking.backends=[]",
)
REWARD = '''"""The tiny model has no right answer yet. This reward differs by response."""


def score(response, answer, **columns):
    return float(len(response))
'''
SMALL_DISK_MIB = 160
"""Room for three checkpoints, of which a run keeps two and writes one."""


@dataclass(frozen=True)
class Planned:
    """The faults of one run."""

    faults: tuple[Fault, ...]
    overrides: tuple[str, ...] = field(default=())
    has_small_disk: bool = False

    @property
    def name(self) -> str:
        return self.faults[0].name if self.faults else ""

    def restricted(self, phases: Sequence[str] | None, overrides: Sequence[str]) -> "Planned":
        """Without the faults of other phases, and with more overrides."""
        faults = tuple(one for one in self.faults if phases is None or one.phase in phases)
        return replace(self, faults=faults, overrides=(*self.overrides, *overrides))


def in_phases(who: str, what: str, phases: tuple[str, ...] = PHASES) -> tuple[Fault, ...]:
    """One in each phase, each in a step of its own."""
    return tuple(Fault(who, what, phase, FIRST + n) for n, phase in enumerate(phases))


def whole() -> Iterator[Planned]:
    """What ``make chaos`` runs."""
    for what in ("SIGKILL", "SIGSTOP"):
        yield Planned(in_phases("driver", what))
        for who in PROCESSES:
            # On CPUs an engine over several workers alone has processes of its own.
            wide = ("rollout.tensor_parallel=2",) if who == "EngineCore" else ()
            yield Planned(in_phases(who, what), wide)
    for what in ("SIGTERM", "SIGINT"):
        at_start = (Fault("driver", what, phase, 0) for phase in ("start_ray", "start_engines"))
        yield Planned((*at_start, *in_phases("driver", what)))
    yield Planned(
        in_phases("disk", "disk full", (START, "checkpoint", METRICS)), has_small_disk=True
    )
    for what in DAMAGES:
        yield Planned((Fault("driver", what, "update", FIRST + 2),))


def short() -> Planned:
    """What the tests run: one run that loses an engine, a rank and a reward worker."""
    return Planned(
        (
            Fault("engine", "SIGKILL", "generate", FIRST),
            Fault("policy rank", "SIGKILL", "update", FIRST + 1),
            Fault("reward worker", "SIGKILL", "reward", FIRST + 2),
        ),
        (f"trainer.steps={FIRST + 2}",),
    )
