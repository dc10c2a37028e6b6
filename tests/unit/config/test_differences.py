"""Differences between configurations of plain data."""

from rltrain.config.differences import ABSENT, differences, flatten


def test_keys_are_dotted_and_lists_are_one_value():
    assert flatten({"a": {"b": 1, "c": {}}, "d": [1, {"e": 2}]}) == {
        "a.b": 1,
        "a.c": {},
        "d": [1, {"e": 2}],
    }


def test_only_what_differs_is_named_and_a_missing_key_is_not_null():
    configs = [{"a": {"b": 1, "c": None}}, {"a": {"b": 1}}, {"a": {"b": 2, "c": None}}]
    assert differences(configs) == {"a.b": [1, 1, 2], "a.c": [None, ABSENT, None]}


def test_a_section_that_became_a_value_differs():
    assert differences([{"a": {"b": 1}}, {"a": 3}]) == {"a.b": [1, ABSENT], "a": [ABSENT, 3]}
