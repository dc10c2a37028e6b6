"""The formulas of the table of bytes, on numbers that a head can check."""

from tests.hosts.expected_bytes import Model, Term, expected, sum_of, table

MODEL = Model(hidden=10, layers=4, experts_per_token=3, weights={"B": 100, "C": 200})


def row(group: int, prompt: str, response: int) -> dict[str, object]:
    return {
        "group": group,
        "sample": 0,
        "prompt": prompt,
        "tokens": ["x"] * response,
        "rollout_logprobs": [-0.5] * response,
    }


def by_name(terms: list[Term]) -> dict[tuple[str, str, str], int]:
    return {(term.what.split(":")[0], term.source, term.target): term.bytes for term in terms}


def test_every_term_of_two_steps() -> None:
    """9 tokens a step: 1 + 3 + 2 of engine 0, and 1 + 1 + 1 of engine 1."""
    step = [row(0, "abc", 2), row(1, "a", 1)]
    found = by_name(expected(MODEL, [step, step], dtype=2))
    assert found["activations, scoring", "B", "C"] == 2 * 9 * 10 * 4
    assert found["activations, update", "B", "C"] == 2 * 9 * 10 * 4
    assert found["their gradients", "C", "B"] == 2 * 9 * 10 * 4
    assert found["weights of the stage", "B", "C"] == 2 * 100 * 2
    assert found["weights of the stage", "C", "B"] == 2 * 200 * 2
    assert found["routes", "B", "C"] == 2 * (6 - 1) * 2 * 3
    assert found["routes", "C", "B"] == 2 * (3 - 1) * 2 * 3
    assert found["batch", "A", "B"] == found["batch", "A", "C"] == 2 * 9 * 27
    assert found["log-probabilities", "C", "A"] == 2 * 9 * 4


def test_the_table_shows_every_term_and_the_ratio() -> None:
    terms = [Term("weights", "B", "C", 900), Term("routes", "C", "B", 50)]
    none = dict.fromkeys([(h, w) for h in "ABC" for w in ("sent", "received")], 0.0)
    measured = none | {("B", "sent"): 1100.0, ("C", "received"): 950.0}
    lines = table(
        terms, measured, none | {("B", "sent"): 100.0, ("A", "sent"): 1, ("A", "received"): 1}
    )
    assert sum_of(terms, "B", "sent") == sum_of(terms, "C", "received") == 900
    assert any("900  B -> C  weights" in line for line in lines)
    assert any(line.split()[3:] == ["1.100", "B", "sent"] for line in lines)
