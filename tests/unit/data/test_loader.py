"""The loader is endless, seeded, never repeats a problem in an epoch, and resumes exactly."""

import json
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rltrain.data.loader import PromptLoader
from rltrain.data.problem import Problem

PROBLEMS = [Problem((i,), f"{i}+0=", str(i)) for i in range(23)]


def take(loader: PromptLoader, steps: int) -> list[list[str]]:
    return [[p.answer for p in step] for step in islice(loader, steps)]


@given(
    size=st.integers(1, 23), done=st.integers(0, 12), more=st.integers(1, 12), seed=st.integers()
)
def test_k_steps_and_a_resume_equal_all_steps(size, done, more, seed):
    whole = take(PromptLoader(PROBLEMS, size, seed), done + more)
    first, second = (PromptLoader(PROBLEMS, size, seed) for _ in range(2))
    assert take(first, done) == whole[:done]
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert take(second, more) == whole[done:]
    assert take(first, more) == whole[done:]  # saving did not disturb it


@given(size=st.integers(1, 23), seed=st.integers())
def test_an_epoch_has_full_steps_of_different_problems(size, seed):
    steps = 23 // size
    epochs = take(PromptLoader(PROBLEMS, size, seed), 2 * steps)
    for epoch in (epochs[:steps], epochs[steps:]):
        answers = [answer for step in epoch for answer in step]
        assert len(answers) == len(set(answers)) == steps * size


def test_seeds_and_epochs_give_other_orders():
    orders = [tuple(map(tuple, take(PromptLoader(PROBLEMS, 23, seed), 2))) for seed in range(5)]
    assert len({epoch for order in orders for epoch in order}) == 10


def test_a_loader_in_use_can_be_rewound():
    loader = PromptLoader(PROBLEMS, 5, 0)
    state = loader.state_dict()
    first = take(loader, 7)
    loader.load_state_dict(state)
    assert take(loader, 7) == first


def test_a_state_of_other_data_is_refused():
    state = PromptLoader(PROBLEMS, 5, 0).state_dict()
    for other in (
        PromptLoader(PROBLEMS[:-1], 5, 0),
        PromptLoader(PROBLEMS, 4, 0),
        PromptLoader(PROBLEMS, 5, 1),
    ):
        with pytest.raises(ValueError, match="saved with other data"):
            other.load_state_dict(state)


@given(size=st.integers(1, 60), few=st.integers(1, 23), done=st.integers(0, 5), seed=st.integers())
def test_few_problems_repeat_in_a_step_where_they_may(size, few, done, seed):
    loader = PromptLoader(PROBLEMS[:few], size, seed, repeat=True)
    if size <= few:
        assert take(loader, 3) == take(PromptLoader(PROBLEMS[:few], size, seed), 3)
        return
    whole = take(loader, done + 1)
    for step in whole:
        times = [step.count(problem.answer) for problem in PROBLEMS[:few]]
        assert sum(times) == size and max(times) - min(times) <= 1
    first, second = (PromptLoader(PROBLEMS[:few], size, seed, repeat=True) for _ in range(2))
    take(first, done)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert take(second, 1) == whole[done:]


def test_no_problems_are_refused():
    with pytest.raises(ValueError, match="no problems to train on"):
        PromptLoader([], 1, 0, repeat=True)


def test_fewer_problems_than_a_step_needs():
    with pytest.raises(
        ValueError, match=r"takes 24 different prompts .* there are 23.*data.repeat_in_step=true"
    ):
        PromptLoader(PROBLEMS, 24, 0)
