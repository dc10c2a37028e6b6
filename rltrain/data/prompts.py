"""From a prompt, text or chat messages, to tokens: the one place where a template is applied."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from rltrain.data.chat_template import Templated, apply_template
from rltrain.data.messages import Messages, read_prompt

Tokens = tuple[int, ...]


class Tokenizer(Templated, Protocol):
    """What we use of a Hugging Face tokenizer."""

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

    A string becomes one user message with ``as_chat``. A template writes its own special tokens;
    plain text gets those that the tokenizer adds, such as a beginning-of-sequence token.

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
        BadRow: the template refuses the messages, or leaves one out.
        ValueError: there is no template, or it does not read what is given to it.
    """
    if isinstance(prompt, str):
        if not as_chat:
            return prompt, False
        prompt = [{"role": "user", "content": prompt}]
    return apply_template(prompt, tokenizer, tools, template_args or {}), True


def encode_texts(texts: Sequence[str], tokenizer: Tokenizer, templated: bool) -> list[Tokens]:
    """Tokens of each text; one that no template wrote gets the tokenizer's special tokens."""
    if not texts:
        return []
    encoded = tokenizer(list(texts), add_special_tokens=not templated)["input_ids"]
    return [tuple(tokens) for tokens in encoded]


def encode_response(response: str, tokenizer: Tokenizer) -> Tokens:
    """Tokens of a supervised response, with the end-of-sequence token that sampled ones end in."""
    return (*tokenizer(response, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id)
