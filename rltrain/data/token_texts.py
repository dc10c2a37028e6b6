"""The text of each token of a sequence, none of it lost.

Decoding one token alone loses a space in some tokenizers, and a token that holds a part of a
character decodes to U+FFFD, whatever its bytes are.
"""

import re
from collections.abc import Sequence
from functools import cache

from rltrain.data.prompts import Tokenizer

UNREAD = "\ufffd"
"""Decoders write it for one or more bytes that are no complete character."""
BYTE = re.compile("<0x([0-9A-F]{2})>")
"""A token of one byte, as Llama 2, Mixtral and Gemma have them."""


def token_texts(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[str]:
    """The text of each token, special tokens included.

    Bytes that are no complete character by themselves are shown as ``\\xe2``. Joined, the texts
    read as the sequence does, with each character that several tokens share shown as its bytes.
    """
    by_token = {token: _text(tokenizer, token) for token in set(tokens)}
    return [by_token[token] for token in tokens]


def decoded(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    """The text of the whole sequence, special tokens included."""
    return tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _text(tokenizer: Tokenizer, token: int) -> str:
    alone = decoded(tokenizer, [token])
    if UNREAD in alone:
        return _shown_bytes(tokenizer, token)
    # The first token of a text may lose its space. The second one has it.
    twice = decoded(tokenizer, [token, token])
    return twice.removeprefix(alone) if twice.startswith(alone) else alone


def _shown_bytes(tokenizer: Tokenizer, token: int) -> str:
    piece = str(tokenizer.convert_ids_to_tokens(token))
    if byte := BYTE.fullmatch(piece):
        data = bytes.fromhex(byte[1])
    elif piece and all(character in byte_of_character() for character in piece):
        data = bytes(byte_of_character()[character] for character in piece)
    else:
        return f"<token {token}>"
    return data.decode("utf-8", "backslashreplace")


@cache
def byte_of_character() -> dict[str, int]:
    """The bytes that characters stand for in the vocabularies of byte-level BPE: those in Latin-1
    for themselves, the others in order for the bytes that are left."""
    from tokenizers.pre_tokenizers import ByteLevel

    alphabet = sorted(ByteLevel.alphabet())
    themselves = {character: ord(character) for character in alphabet if ord(character) < 256}
    left = sorted(set(range(256)) - set(themselves.values()))
    return themselves | dict(zip(alphabet[len(themselves) :], left, strict=True))
