"""Encodes prompts, text or chat messages, as tokens. Chat templates are applied only here."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from rltrain.data.chat_template import Templated, apply_template
from rltrain.data.messages import Messages, read_prompt

Tokens = tuple[int, ...]


class Tokenizer(Templated, Protocol):
    """The part of a Hugging Face tokenizer that rltrain uses."""

    eos_token_id: Any
    all_special_tokens: Sequence[str]

    def __call__(self, text: Any, *, add_special_tokens: bool) -> Any: ...
    def convert_ids_to_tokens(self, ids: int) -> Any: ...
    def decode(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool,
        clean_up_tokenization_spaces: bool,
    ) -> str: ...


def encode_prompt(prompt: object, tokenizer: Tokenizer, as_chat: bool) -> tuple[str, Tokens]:
    """Text and tokens of a prompt that is a string or a list of chat messages.

    With ``as_chat`` a string becomes one user message. Templates contain their special tokens.
    Plain text gets the special tokens of the tokenizer, such as a beginning-of-sequence token.

    Raises:
        ValueError: for anything else, or for messages when the tokenizer has no chat template.
    """
    text, templated = render(read_prompt(prompt, "prompt"), tokenizer, as_chat)
    return text, encode_texts([text], tokenizer, templated)[0]


def render(
    prompt: str | Messages,
    tokenizer: Tokenizer,
    as_chat: bool,
    tools: list[dict[str, Any]] | None = None,
    template_args: Mapping[str, Any] | None = None,
) -> tuple[str, bool]:
    """The text that the model reads, and whether a chat template wrote it.

    Raises:
        BadRow: the template rejects the messages, or leaves one out.
        ValueError: there is no template, or it ignores an argument.
    """
    if isinstance(prompt, str):
        if not as_chat:
            return prompt, False
        prompt = [{"role": "user", "content": prompt}]
    return apply_template(prompt, tokenizer, tools, template_args or {}), True


def encode_texts(texts: Sequence[str], tokenizer: Tokenizer, templated: bool) -> list[Tokens]:
    """Tokens of each text. Unless ``templated``, the tokenizer adds its special tokens."""
    if not texts:
        return []
    encoded = tokenizer(list(texts), add_special_tokens=not templated)["input_ids"]
    return [tuple(tokens) for tokens in encoded]


def encode_response(response: str, tokenizer: Tokenizer) -> Tokens:
    """Tokens of a supervised response, with the end-of-sequence token at the end."""
    return (*tokenizer(response, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id)
