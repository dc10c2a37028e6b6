"""What a check of ``rltrain doctor`` says, and how checks are run and shown."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum

from rltrain.config.error_codes import codes_in
from rltrain.config.redact import redacted_text


class State(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    NOT_APPLICABLE = "not applicable"


@dataclass(frozen=True)
class Finding:
    check: str
    """What was looked at, in a word or two."""
    state: State
    found: str
    remedy: str = ""
    """What to do; given with every warning and failure."""

    def __post_init__(self) -> None:
        needs_remedy = self.state in (State.WARN, State.FAIL)
        assert bool(self.remedy) == needs_remedy, f"{self.check}: a remedy goes with a problem"


def ok(check: str, found: str) -> Finding:
    return Finding(check, State.OK, found)


def warn(check: str, found: str, remedy: str) -> Finding:
    return Finding(check, State.WARN, found, remedy)


def fail(check: str, found: str, remedy: str) -> Finding:
    return Finding(check, State.FAIL, found, remedy)


def not_applicable(check: str, why: str) -> Finding:
    return Finding(check, State.NOT_APPLICABLE, why)


def remedy_of(error: str, otherwise: str) -> str:
    """Where to read what to do about an error message: its entry, if it has a code."""
    codes = codes_in(error)
    return f"rltrain explain {' '.join(codes)}" if codes else otherwise


Check = Callable[[], Iterable[Finding]]


def run_check(name: str, check: Check) -> list[Finding]:
    """The findings of one check. A check that raises is a failure of its own, and no other's."""
    try:
        return list(check())
    except Exception as error:  # reported below: one broken check must not hide the others
        return [
            fail(
                name,
                f"the check itself broke: {type(error).__name__}: {error}",
                "report this, with the output of rltrain doctor --json",
            )
        ]


def exit_status(findings: Iterable[Finding]) -> int:
    """1 if anything failed; warnings do not count."""
    return int(any(finding.state is State.FAIL for finding in findings))


def show_finding(finding: Finding) -> str:
    """One line, and the remedy below it."""
    found = " ".join(finding.found.split())
    line = f"{finding.state:<14} {finding.check:<22} {found}\n"
    indent = " " * 38
    return line + (f"{indent}-> {' '.join(finding.remedy.split())}\n" if finding.remedy else "")


def show_summary(findings: Sequence[Finding], seconds: float) -> str:
    counts = {state: sum(f.state is state for f in findings) for state in State}
    said = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    return f"{said} ({seconds:.1f} s)\n"


def show_json(findings: Sequence[Finding], environment: Mapping[str, str]) -> str:
    """For a bug report or a script; what looks like a secret is redacted."""
    document = {
        "exit_status": exit_status(findings),
        "findings": [asdict(finding) for finding in findings],
    }
    return redacted_text(json.dumps(document, indent=2), environment) + "\n"
