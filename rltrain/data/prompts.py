"""From a prompt, text or chat messages, to tokens: the one place where a template is applied."""

from collections.abc import Sequence
from typing import Any, Protocol

Messages = list[dict[str, Any]]


class Tokenizer(Protocol):
    """What we use of a Hugging Face tokenizer."""

    chat_template: Any
    eos_token_id: Any
    all_special_tokens: Sequence[str]

    def __call__(self, text: str, *, add_special_tokens: bool) -> Any: ...
    def apply_chat_template(
        self, conversation: Messages, *, add_generation_prompt: bool, tokenize: bool
    ) -> Any: ...
    def decode(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool,
        clean_up_tokenization_spaces: bool,
    ) -> str: ...


def encode_prompt(
    prompt: object, tokenizer: Tokenizer, as_chat: bool
) -> tuple[str, tuple[int, ...]]:
    """Text and tokens of a prompt that is a string or a list of chat messages.

    A string becomes one user message with ``as_chat``. A template writes its own special tokens;
    plain text gets those that the tokenizer adds, such as a beginning-of-sequence token.

    Raises:
        ValueError: for anything else, or for messages when the tokenizer has no chat template.
    """
    if isinstance(prompt, str) and not as_chat:
        return prompt, tuple(tokenizer(prompt, add_special_tokens=True)["input_ids"])
    single = [{"role": "user", "content": prompt}]
    messages = single if isinstance(prompt, str) else _check_messages(prompt)
    if not tokenizer.chat_template:
        raise ValueError(
            "the prompt is chat messages and the model's tokenizer has no chat_template: "
            "use a model that has one, or give the prompt as text"
        )
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return text, tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def encode_response(response: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Tokens of a supervised response, with the end-of-sequence token that sampled ones end in."""
    return (*tokenizer(response, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id)


def _check_messages(messages: object) -> Messages:
    expected = "expected text or a list of messages like {'role': 'user', 'content': '...'}"
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"{expected}, found {type(messages).__name__} {str(messages)[:80]!r}")
    for message in messages:
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise ValueError(f"{expected}, found the message {str(message)[:80]}")
    return messages
