"""Increments of chat templates against the whole conversation, rendered and tokenized at once."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rltrain.data.increments import check_history, increment_tokens
from rltrain.data.tokenizer import EOS, tiny_tokenizer

CHATML = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
"""With a line break that no response ends with."""
THINKING = (
    "{% for m in messages %}<|start|>{{ m.role }}\n"
    "{{ m.content.split('</think>')[-1] if not loop.last else m.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n<think>\n{% endif %}"
)
"""Opens a block of reasoning for the model, and leaves it out of the history."""
TEXT = st.text(st.sampled_from("ab1 é\n"), max_size=6)
ROLES = st.sampled_from(["user", "tool"])
ANSWERS = st.lists(
    st.builds(lambda r, c: {"role": r, "content": c}, ROLES, TEXT), min_size=1, max_size=3
)
TOKENIZER = tiny_tokenizer()


def with_template(template: str | None) -> Any:
    tokenizer = tiny_tokenizer()
    if template is not None:
        tokenizer.chat_template = template
    return tokenizer


def whole(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    tokens: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return tokens


@pytest.mark.parametrize("template", [None, CHATML], ids=["tiny", "chatml"])
@given(turns=st.lists(st.tuples(TEXT, ANSWERS), min_size=1, max_size=4))
def test_what_is_appended_is_the_conversation_rendered_at_once(
    template: str | None, turns: list[tuple[str, list[dict[str, str]]]]
) -> None:
    tokenizer = with_template(template)
    messages = [{"role": "user", "content": "hello"}]
    tokens = whole(tokenizer, messages)
    end = tokenizer.convert_tokens_to_ids(EOS)
    for response, answers in turns:
        check_history(messages, answers, tokenizer)
        tokens += [*tokenizer(response, add_special_tokens=False)["input_ids"], end]
        tokens += increment_tokens(messages, answers, tokenizer, response_end=end)
        messages += [{"role": "assistant", "content": response}, *answers]
        assert tokens == whole(tokenizer, messages)


def test_a_response_that_did_not_end_itself_gets_its_end() -> None:
    tokenizer = with_template(CHATML)
    history, answers = [{"role": "user", "content": "a"}], [{"role": "tool", "content": "b"}]
    end = tokenizer.convert_tokens_to_ids(EOS)
    with_end = increment_tokens(history, answers, tokenizer, response_end=None)
    assert with_end == (end, *increment_tokens(history, answers, tokenizer, response_end=end))
    # Another token ended it: nothing of the increment is left out.
    assert with_end == increment_tokens(history, answers, tokenizer, response_end=5)


def test_a_template_that_rewrites_the_history_is_refused_at_its_first_token() -> None:
    tokenizer = with_template(THINKING)
    history, answers = [{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}]
    at = len(whole(tokenizer, history)) - len("<think>\n")
    with pytest.raises(ValueError, match=rf"token {at} was '<' and becomes the end\."):
        check_history(history, answers, tokenizer)
    check_history(history, answers, with_template(CHATML))


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for m in messages %}{{ m.content.upper() }}{% endfor %}", "found it 0 times"),
        ("{% for m in messages %}{{ m.content * 2 }}{% endfor %}", "found it 2 times"),
        (
            "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}"
            "{% endif %}{% endfor %}",
            "refuses a conversation of user, assistant, tool: TemplateError: no tools",
        ),
    ],
)
def test_templates_without_turns_are_refused(template: str, message: str) -> None:
    history, answers = [{"role": "user", "content": "a"}], [{"role": "tool", "content": "b"}]
    with pytest.raises(ValueError, match=message):
        increment_tokens(history, answers, with_template(template), response_end=None)
