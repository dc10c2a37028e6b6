"""A patch applies once, and only to what it was read against."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType

import pytest

from rltrain.patches.registry import Patch, PatchRefused, apply, is_applied


@pytest.fixture
def library() -> Iterator[ModuleType]:
    module = ModuleType("third_party")

    def double(x: int, times: int = 2) -> int:
        return x * times

    class Counter:
        def count(self, start: int) -> int:
            return start + 1

    module.double, module.Counter = double, Counter  # type: ignore[attr-defined]
    sys.modules["third_party"] = module
    yield module
    del sys.modules["third_party"]


def add_ten(original: Callable[..., int]) -> Callable[..., int]:
    return lambda *args, **kwargs: original(*args, **kwargs) + 10


PATCH = Patch(
    package=("no-such-package", "pytest"),
    versions=">=1",
    target="third_party:double",
    params=("x", "times"),
    reason="it forgets the ten",
    remove_when="it adds ten",
    wrap=add_ten,
)


def test_applies_once(library: ModuleType) -> None:
    assert not is_applied(PATCH)
    apply(PATCH)
    apply(PATCH)
    assert is_applied(PATCH)
    assert library.double(1) == 12


def test_applies_to_methods(library: ModuleType) -> None:
    apply(replace(PATCH, target="third_party:Counter.count", params=("self", "start")))
    assert library.Counter().count(0) == 11


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"versions": "<1"}, "read against pytest<1, found"),
        ({"package": ("no-such-package",)}, "needs no-such-package, which is not installed"),
        ({"params": ("x",)}, r"takes \('x', 'times'\), but its patch was read against \('x',\)"),
        ({"target": "third_party:triple"}, "no attribute 'triple'"),
        ({"target": "third_party:Counter.missing"}, "no attribute 'missing'"),
    ],
)
def test_refuses_what_it_was_not_read_against(
    library: ModuleType, change: dict[str, object], message: str
) -> None:
    with pytest.raises(PatchRefused, match=message):
        apply(replace(PATCH, **change))
    assert library.double(1) == 2
