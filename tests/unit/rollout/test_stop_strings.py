"""A response ends at the first token with which its text has a stop string, and at no other."""

import string
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from rltrain.data.tokenizer_checks import check_stop_strings
from rltrain.rollout.completion import vllm_params
from rltrain.rollout.requests import Request as OurRequest
from rltrain.rollout.requests import Rollout, SamplingParams
from rltrain.rollout.stop_scheduler import with_stop_strings
from rltrain.rollout.stop_strings import StopStrings, response_texts

SPECIAL = ["<pad>", "<eos>", "<|end|>"]
EOS, END = 1, 2
BYTES = pre_tokenizers.ByteLevel.alphabet()


def wrapped(tokenizer: Tokenizer) -> Any:
    tokenizer.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        extra_special_tokens=["<|end|>"],
    )


@cache
def byte_level() -> Any:
    """As Qwen, Llama 3 and GPT have it; with halves of characters, and long pieces."""
    pieces = [
        *SPECIAL,
        *sorted(BYTES),
        "ab",
        "abab",
        "</",
        "answer",
        ">\u010a",
        "\u0120the",
        "\u010a\u010a",
    ]
    pieces += ["\u00c3\u00a9", "c\u00c3", "\u00a9d"]  # an e with acute, and its halves
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return wrapped(tokenizer)


@cache
def sentence_piece() -> Any:
    """As Llama 2 and Mixtral have it: spaces in the pieces, the first of a text is lost."""
    pieces = [*SPECIAL, "<unk>", *(f"<0x{n:02X}>" for n in range(256))]
    pieces += [
        "\u2581",
        "\u2581the",
        "\u2581a",
        "ab",
        "abab",
        "</",
        "answer",
        ">",
        *string.ascii_letters,
    ]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return wrapped(tokenizer)


TOKENIZERS = {"byte_level": byte_level, "sentence_piece": sentence_piece}


def text_of(tokenizer: Any, tokens: Sequence[int]) -> str:
    found: str = tokenizer.decode(
        list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    return found


def first_end(tokenizer: Any, tokens: Sequence[int], stops: Sequence[str]) -> int | None:
    """By decoding every prefix as a whole."""
    ends = range(1, len(tokens) + 1)
    return next((n for n in ends if any(s in text_of(tokenizer, tokens[:n]) for s in stops)), None)


def found_end(tokenizer: Any, tokens: Sequence[int], stops: Sequence[str], piece: int) -> Any:
    """What an engine finds that samples ``piece`` tokens at once."""
    strings = StopStrings(tokenizer, stops)
    for start in range(0, len(tokens), piece):
        stop, count = strings.end(tokens[:start], tokens[start : start + piece])
        if stop is not None:
            return stop, start + count
    return None, None


PIECES = [
    "a",
    "b",
    "ab",
    "</",
    "answer",
    ">",
    "\n",
    " ",
    "the",
    "\u00e9",
    "c",
    "d",
    "<|end|>",
    "</answer>",
]
STOPS = st.lists(
    st.lists(st.sampled_from(PIECES), min_size=1, max_size=3).map("".join),
    min_size=1,
    max_size=3,
    unique=True,
)


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(data=st.data(), stops=STOPS, piece=st.integers(1, 4))
def test_the_end_is_where_the_text_first_has_the_string(
    kind: str, data: st.DataObject, stops: list[str], piece: int
) -> None:
    tokenizer = TOKENIZERS[kind]()
    some = [t for text in PIECES for t in tokenizer(text, add_special_tokens=False)["input_ids"]]
    token = st.one_of(st.sampled_from(some), st.integers(0, len(tokenizer) - 1))
    tokens = data.draw(st.lists(token, max_size=40))
    expected = first_end(tokenizer, tokens, stops)
    stop, count = found_end(tokenizer, tokens, stops, piece)
    assert count == expected
    if count is not None:
        assert stop in text_of(tokenizer, tokens[:count])


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_long_responses_are_read_at_their_end_and_special_tokens_count_as_text(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]()
    for stop in (" the", "\n\n", "</answer>", "x<|end|>", "\u00e9\u00e9"):
        tail = tokenizer(f"b{stop}ab", add_special_tokens=False)["input_ids"]
        filler = tokenizer("ab\u00e9 ", add_special_tokens=False)["input_ids"] * 50
        for tokens in ([*filler, *tail], [*filler, *[END] * 30, *tail]):
            expected = first_end(tokenizer, tokens, [stop])
            assert expected is not None and expected > len(filler)
            assert found_end(tokenizer, tokens, [stop], 1) == (stop, expected)


LONG = st.text("\u7b54\u6848\u00e9\U0001f600\na", min_size=1, max_size=9).map(str.encode)
"""Characters that are several tokens, and two that may be among them."""


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(stop=LONG, filler=LONG, parts=st.lists(st.one_of(LONG, st.binary(max_size=1)), max_size=2))
def test_tokens_of_single_bytes_are_read_whole(
    kind: str, stop: bytes, filler: bytes, parts: list[bytes]
) -> None:
    """Also where a byte that fits nowhere spoils what is beside it."""
    tokenizer, letters = TOKENIZERS[kind](), bytes_to_unicode()
    if kind == "sentence_piece":
        letters = {x: "a" if x == ord("a") else f"<0x{x:02X}>" for x in letters}
    text = b"".join([*parts, filler * 10, *parts, stop])
    tokens = tokenizer.convert_tokens_to_ids([letters[x] for x in text])
    stops = [stop.decode()]
    assert found_end(tokenizer, tokens, stops, 1)[1] == first_end(tokenizer, tokens, stops)


def rollout(tokens: Sequence[int], stop: str | None = None, reason: Any = "stop") -> Rollout:
    return Rollout((5,), tuple(tokens), None, reason, 0, None, stop)


def test_the_text_is_what_came_before_the_end() -> None:
    tokenizer = byte_level()

    def ids(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    both = "say <|end|>it <|end|>42"
    clean = "say it 42"
    assert response_texts(tokenizer, rollout([*ids(both), EOS])) == (both, clean)
    assert response_texts(tokenizer, rollout(ids(both), reason="length")) == (both, clean)
    assert response_texts(tokenizer, rollout(ids(both + "\n\n"), "\n\n")) == (both, clean)
    piece = tokenizer.convert_tokens_to_ids("ab")
    cut = response_texts(tokenizer, rollout([*ids(both), piece], "b"))
    assert cut == (both + "a", clean + "a")
    assert response_texts(tokenizer, rollout(ids(both), "it <|end|>42")) == ("say <|end|>", "say ")
    assert response_texts(tokenizer, rollout(ids("1<|end|>"), "<|end|>")) == ("1", "1")
    assert response_texts(tokenizer, rollout([EOS])) == ("", "")
    assert response_texts(tokenizer, rollout(ids("x ."), reason="length"))[1] == "x ."
    with pytest.raises(ValueError, match="expected it there"):
        response_texts(tokenizer, rollout(ids("42"), "x"))


def test_a_string_that_the_tokenizer_does_not_keep_is_refused() -> None:
    check_stop_strings(byte_level(), ["</answer>", "\n\n", "<|end|>", "\u00e9"])
    lower = Tokenizer(models.WordLevel({"<pad>": 0, "a": 1}, unk_token="<pad>"))
    lower.normalizer = normalizers.Lowercase()
    for stop in ("A", "b"):
        with pytest.raises(ValueError, match=f"rollout.stop: '{stop}' becomes"):
            check_stop_strings(wrapped(lower), ["a", stop])


@pytest.fixture
def scheduler(tmp_path: Any) -> Any:
    """vLLM's own way to end requests, in a scheduler that has nothing else."""
    byte_level().save_pretrained(tmp_path)

    class Ending:
        vllm_config = type(
            "",
            (),
            {
                "model_config": type(
                    "", (), {"tokenizer": str(tmp_path), "trust_remote_code": False}
                )
            },
        )
        max_model_len = 1000
        _update_request_with_output = Scheduler._update_request_with_output

    return with_stop_strings(Ending)()


def request(max_tokens: int = 100, stops: Sequence[str] = ("ab",)) -> Request:
    params = vllm_params(
        OurRequest((5,), 0, "p", 0), SamplingParams(1.0, max_tokens, stop=tuple(stops)), [EOS]
    )
    made = Request("r", [5], params, None)
    made.status = RequestStatus.RUNNING
    return made


@pytest.mark.parametrize(
    ("text", "eos_after", "max_tokens", "kept", "status", "reason"),
    [
        ("xabyz", None, 100, "xab", RequestStatus.FINISHED_STOPPED, "ab"),
        ("xab", None, 3, "xab", RequestStatus.FINISHED_STOPPED, "ab"),
        ("xab", None, 2, "xa", RequestStatus.FINISHED_LENGTH_CAPPED, None),
        ("xab", 1, 100, "x<eos>", RequestStatus.FINISHED_STOPPED, EOS),
        ("xab", 3, 100, "xab", RequestStatus.FINISHED_STOPPED, "ab"),
        ("xba", None, 100, "xba", RequestStatus.RUNNING, None),
    ],
)
def test_the_scheduler_keeps_no_token_after_the_string(
    scheduler: Any,
    text: str,
    eos_after: int | None,
    max_tokens: int,
    kept: str,
    status: Any,
    reason: Any,
) -> None:
    tokens = [t for c in text for t in byte_level()(c, add_special_tokens=False)["input_ids"]]
    if eos_after is not None:
        tokens.insert(eos_after, EOS)
    for size in (1, len(tokens)):  # one at once, and all, as with speculative decoding
        made, taken, stopped = request(max_tokens), [], False
        for start in range(0, len(tokens), size):
            new, stopped = scheduler._update_request_with_output(made, tokens[start : start + size])
            taken += new
            if stopped:
                break
        assert text_of(byte_level(), taken) == kept
        assert list(made.output_token_ids) == taken
        assert (made.status, made.stop_reason) == (status, reason)
        assert stopped == (status != RequestStatus.RUNNING)


def test_a_request_without_strings_is_left_to_vllm(scheduler: Any) -> None:
    made = request(stops=())
    assert made.sampling_params.extra_args is None
    tokens = byte_level()("abab", add_special_tokens=False)["input_ids"]
    assert scheduler._update_request_with_output(made, tokens) == (tokens, False)
