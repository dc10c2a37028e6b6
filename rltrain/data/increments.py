"""What a chat template writes between two responses of a conversation.

The history is never tokenized again: behind the tokens of a response come those of its increment,
which are the end of the assistant's message, the messages that answer it, and the start of the next
response. Templates say that only as part of a whole conversation. So one is rendered with a mark in
the place of the response, and cut there.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rltrain.data.chat_template import template_of
from rltrain.data.messages import Messages
from rltrain.data.prompts import Tokenizer, Tokens

MARK = "\u2063response\u2063"
"""Two invisible separators: no template looks for it or strips it, and no conversation has it."""


def increment_tokens(
    history: Messages,
    answers: Messages,
    tokenizer: Tokenizer,
    response_end: int | None,
    tools: list[dict[str, Any]] | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> Tokens:
    """The tokens behind a response to ``history`` that ``answers`` follow.

    Args:
        answers: messages of the environment, e.g. of role ``user`` or ``tool``
        response_end: the token that ended the response, where one did: it is not repeated

    Raises:
        ValueError: the template rejects the messages, or the response is not in what it writes.
    """
    conversation = [*history, {"role": "assistant", "content": MARK}, *answers]
    text = _render(conversation, tokenizer, tools, arguments)
    if text.count(MARK) != 1:
        raise ValueError(
            "the chat template does not write an assistant's message as it is: expected it once "
            f"in the conversation, found it {text.count(MARK)} times. Such a template cannot be "
            "used for several turns"
            " [RL2008]"
        )
    after = text.partition(MARK)[2]
    tokens = tuple(tokenizer(after, add_special_tokens=False)["input_ids"])
    return tokens[1:] if tokens[:1] == (response_end,) else tokens


def check_history(
    history: Messages,
    answers: Messages,
    tokenizer: Tokenizer,
    tools: list[dict[str, Any]] | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> None:
    """Check that in the next turn the template writes what the model has read in this one.

    Raises:
        ValueError: it writes the history in another way, such as without the reasoning of earlier
            responses; with the first token that differs.
    """
    read = _render(history, tokenizer, tools, arguments)
    conversation = [*history, {"role": "assistant", "content": MARK}, *answers]
    again = _render(conversation, tokenizer, tools, arguments).partition(MARK)[0]
    if read == again:
        return
    one, two = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (read, again))
    at = first_difference(one, two)
    raise ValueError(
        "the chat template writes the history of a later turn in another way than the model read "
        f"it: token {at} was {_shown(tokenizer, one, at)} and becomes {_shown(tokenizer, two, at)}."
        " Set the argument of the template that keeps it (data.template_args, e.g. for reasoning), "
        "or use a template whose turns follow one another"
        " [RL2008]"
    )


def _render(
    conversation: Messages,
    tokenizer: Tokenizer,
    tools: list[dict[str, Any]] | None,
    arguments: Mapping[str, Any] | None,
) -> str:
    template_of(tokenizer, tools)
    try:
        text: str = tokenizer.apply_chat_template(
            conversation,
            tools=tools,
            add_generation_prompt=True,
            tokenize=False,
            **(arguments or {}),
        )
    except Exception as error:  # a template may raise anything
        roles = ", ".join(str(message["role"]) for message in conversation)
        raise ValueError(
            f"the chat template refuses a conversation of {roles}: {type(error).__name__}: {error}"
            " [RL2008]"
        ) from error
    return text


def first_difference(one: Sequence[int], two: Sequence[int]) -> int:
    """Where two lists of tokens differ first; the length of the shorter if it begins the other."""
    same = [a == b for a, b in zip(one, two, strict=False)]
    return same.index(False) if False in same else len(same)


def _shown(tokenizer: Tokenizer, tokens: Sequence[int], at: int) -> str:
    return repr(str(tokenizer.convert_ids_to_tokens(tokens[at]))) if at < len(tokens) else "the end"
