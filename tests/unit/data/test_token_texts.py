"""The text of single tokens, on real tokenizers of three kinds: no byte is lost."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rltrain.data.token_texts import token_texts
from rltrain.data.tokenizer import EOS, tiny_tokenizer

BYTES = tiny_tokenizer()


def sentencepiece() -> PreTrainedTokenizerFast:
    """As Llama 2: words with a space before them, and a token for every byte."""
    pieces = ["<unk>", "</s>", "\u2581", "\u2581hi", "\u2581there", "hi", "!", "\u2581\u2581"]
    vocab = {piece: n for n, piece in enumerate([*pieces, *(f"<0x{n:02X}>" for n in range(256))])}
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


def byte_level(*pieces: bytes) -> PreTrainedTokenizerFast:
    """As Qwen: tokens of several bytes, which need not be whole characters."""
    character = {byte: c for c, byte in _bytes_to_characters().items()}
    vocab = {"".join(character[b] for b in piece): n for n, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def _bytes_to_characters() -> dict[str, int]:
    """GPT-2's table, from its definition (openai/gpt-2 ``encoder.py``)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}


def whole(texts: list[str]) -> str:
    """The bytes that the texts show, read as one."""
    parts = re.split(r"\\x([0-9a-f]{2})", "".join(texts))
    data = b"".join(bytes.fromhex(p) if n % 2 else p.encode() for n, p in enumerate(parts))
    return data.decode()


@given(st.text().filter(lambda text: "\\" not in text))
def test_no_byte_of_any_text_is_lost(text: str) -> None:
    tokens = BYTES(text + EOS, add_special_tokens=False)["input_ids"]
    texts = token_texts(BYTES, tokens)
    assert len(texts) == len(tokens)
    assert whole(texts) == text + EOS
    assert texts[-1] == EOS
    assert "\ufffd" not in "".join(texts) or "\ufffd" in text


def test_a_split_character_is_shown_as_bytes_and_what_is_beside_it_as_text() -> None:
    tokenizer = byte_level(b"caf\xc3", b"\xa9 now", b" ok", "\ufffd".encode(), b"\xff")
    assert token_texts(tokenizer, [0, 1, 2, 3, 4]) == [
        "caf\\xc3",
        "\\xa9 now",
        " ok",
        "\ufffd",  # a token that is this character
        "\\xff",
    ]


def test_spaces_and_bytes_of_sentencepiece_stay() -> None:
    tokenizer = sentencepiece()
    ids = tokenizer.convert_tokens_to_ids
    pieces = [
        "\u2581hi",
        "\u2581there",
        "hi",
        "!",
        "\u2581\u2581",
        "<0xE2>",
        "<0x41>",
        "<0x0A>",
        "</s>",
    ]
    assert token_texts(tokenizer, [ids(piece) for piece in pieces]) == [
        *(" hi", " there", "hi", "!", "  ", "\\xe2", "A", "\n", "</s>")
    ]


def test_bytes_that_a_tokenizer_does_not_tell_are_named_by_the_token() -> None:
    class Opaque:
        def decode(self, ids: Any, **_: Any) -> str:
            return "\ufffd" * len(ids)

        def convert_ids_to_tokens(self, token: int) -> str:
            return "\u00e9\u4e00"

    opaque: Any = Opaque()
    assert token_texts(opaque, [7]) == ["<token 7>"]


@pytest.mark.parametrize("tokens", [[], [5]])
def test_short_sequences(tokens: list[int]) -> None:
    assert len(token_texts(BYTES, tokens)) == len(tokens)
