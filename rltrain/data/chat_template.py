"""Applies chat templates, and checks that no message or argument is ignored."""

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, Protocol

from jinja2 import TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rltrain.data.bad_rows import BadRow
from rltrain.data.messages import Messages

KEPT_ROLES = ("system", "developer", "user")
"""Roles whose content a template must not leave out or change. Other roles are not checked: many
templates remove the reasoning of earlier assistant turns, and rewrite tool results."""

CLOCK = "strftime_now"
"""Function that a template calls for the current date."""


class Templated(Protocol):
    """The part of a Hugging Face tokenizer that is used here."""

    chat_template: Any

    def get_chat_template(self, chat_template: Any = None, tools: Any = None) -> str: ...
    def apply_chat_template(self, conversation: Messages, **arguments: Any) -> Any: ...


class _Generation(Extension):
    """Reads ``{% generation %}``, with which templates mark the assistant's tokens."""

    tags = {"generation"}  # noqa: RUF012  # as jinja2 declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(maxsize=8)
def variables_of(template: str) -> frozenset[str]:
    """The variables that a chat template reads.

    Raises:
        ValueError: it is no valid template.
    """
    environment = ImmutableSandboxedEnvironment(extensions=[_Generation, loopcontrols])
    try:
        return frozenset(meta.find_undeclared_variables(environment.parse(template)))
    except TemplateError as error:
        raise ValueError(f"the tokenizer's chat_template is broken: {error} [RL2008]") from error


def template_of(tokenizer: Templated, tools: object = None) -> str:
    """The template that the tokenizer applies.

    Raises:
        ValueError: it has none.
    """
    if not tokenizer.chat_template:
        raise ValueError(
            "the prompt is chat messages and the model's tokenizer has no chat_template: "
            "use a model that has one, or give the prompt as text"
            " [RL2008]"
        )
    return tokenizer.get_chat_template(None, tools)


def check_arguments(template: str, arguments: Iterable[str]) -> None:
    """Raises ValueError when the template does not read one of ``arguments``."""
    known = variables_of(template)
    for name in arguments:
        if name not in known:
            ours = {"messages", "add_generation_prompt", CLOCK, "raise_exception", "namespace"}
            others = ", ".join(sorted(known - ours - {"bos_token", "eos_token"})) or "none"
            source = (
                "data.tools_column gives it tools"
                if name == "tools"
                else f"data.template_args.{name}"
            )
            raise ValueError(
                f"the model's chat template does not read {name!r}, and {source}: it would have no "
                f"effect. Arguments that it reads: {others}"
                " [RL2008]"
            )


def apply_template(
    messages: Messages, tokenizer: Templated, tools: Any, arguments: Mapping[str, Any]
) -> str:
    """The text of the messages by the template, ending with the start of the assistant's turn.

    Raises:
        BadRow: the template rejects them, or leaves a message out.
        ValueError: there is no template, or it ignores an argument.
    """
    template = template_of(tokenizer, tools)
    check_arguments(template, [*arguments, *(["tools"] if tools else [])])
    try:
        text: str = tokenizer.apply_chat_template(
            messages, tools=tools, add_generation_prompt=True, tokenize=False, **arguments
        )
    except Exception as error:  # a template may raise anything
        raise BadRow(
            "the chat template refuses the messages", f"{type(error).__name__}: {error}"
        ) from error
    for number, message in enumerate(messages):
        if message["role"] in KEPT_ROLES and message["content"].strip() not in text:
            raise BadRow(
                "the chat template leaves out or changes a message",
                f"message {number} ({message['role']}): {message['content'][:60]!r}",
            )
    return text
