"""Checks that a tokenizer gives the tokens that the model was trained on.

`tokenizers` is imported where a folder has a ``tokenizer.json``.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rltrain.data.model_tokenizer import TOKENIZER, load_auto_tokenizer

SENTENCE = "The answer is 42, and it is  right."
"""Text for the round trip: the decoded text must have as many words."""
PROBES = (
    SENTENCE,
    " leading and trailing ",
    "a  b   c\td",
    "12345 + 6789.5 = 19,134.50; -7 x 10^3",
    "one\ntwo\n\nthree\n\n\n\tfour\r\n",
    "def f(x):\n    return x['a'] != \"b\"  # c",
    "it's I'm DON'T we'll",
    "na\u00efve cafe\u0301 \u6c49\u5b57 \u0440\u0443\u0441 \u0627\u0644 \U0001f642\u200d \u00a0.",
    r"$\frac{1}{2}$ \boxed{42} <think>",
)
NUM_SHOWN = 24
"""Maximum number of ids of a text in a message."""


def check_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Check that the tokenizer agrees with the folder's ``tokenizer.json``, and loses no word.

    Raises:
        ValueError: they differ; the message has the text and the tokens of both.
    """
    file = folder / TOKENIZER
    if file.is_file():
        from tokenizers import Tokenizer

        raw = Tokenizer.from_file(str(file))
        raw.no_truncation()
        raw.no_padding()
        known = {token.content for token in raw.get_added_tokens_decoder().values()}
        special = [token for token in tokenizer.all_special_tokens if token in known]
        for text in _probes(special):
            ours, theirs = _ids(tokenizer, text), raw.encode(text, add_special_tokens=False).ids
            if ours != theirs:
                of_file = _shown(theirs, raw.decode(theirs, skip_special_tokens=False))
                raise ValueError(
                    f"{folder}: {_differ(tokenizer, text)} and its {TOKENIZER} {of_file}. {_REMEDY}"
                    " [RL3005]"
                )
    check_round_trip(tokenizer, folder)


def check_stop_strings(tokenizer: Any, stops: Sequence[str]) -> None:
    """Raise ValueError for a string of ``rollout.stop`` that the tokenizer does not keep."""
    for stop in stops:
        text = _decoded(tokenizer, _ids(tokenizer, stop))
        if stop not in text:
            raise ValueError(
                f"rollout.stop: {stop!r} becomes {text!r} in the model's tokenizer, so that no "
                "response would ever end at it: expected text that the tokenizer keeps"
                " [RL1013]"
            )


def check_round_trip(tokenizer: Any, where: object) -> None:
    """Check that spaces between words are kept. Wrongly converted tokenizers lose them."""
    decoded = _decoded(tokenizer, ids := _ids(tokenizer, SENTENCE))
    if not ids:  # transformers makes an empty one where the files are missing
        raise ValueError(
            f"{where} has no tokenizer: it makes no token of {SENTENCE!r}. Copy the files of the "
            f"model's tokenizer there ({TOKENIZER} or those that it is made of) [RL3005]"
        )
    if len(decoded.split()) < len(SENTENCE.split()):
        raise ValueError(
            f"{where}: its tokenizer loses spaces: it makes {_shown(ids, decoded)} of "
            f"{SENTENCE!r}. Its files may have been saved from a tokenizer that was loaded "
            "wrongly: fetch them again"
            " [RL3005]"
        )


def check_auto_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Check that AutoTokenizer of transformers loads the same tokenizer from the folder.

    vLLM, and other users of the trained model, load it with AutoTokenizer. This imports torch,
    which takes seconds.

    Raises:
        ValueError: they differ; the message has the text and the tokens of both.
    """
    auto = load_auto_tokenizer(folder, trust_remote_code=False)
    for text in _probes(tokenizer.all_special_tokens):
        for special in (False, True):
            ours, theirs = _ids(tokenizer, text, special), _ids(auto, text, special)
            if ours != theirs:
                of_auto = _shown(theirs, _decoded(auto, theirs))
                raise ValueError(
                    f"{folder}: {_differ(tokenizer, text, special)} and transformers' "
                    f"{type(auto).__name__}, which AutoTokenizer takes it for, {of_auto}. {_REMEDY}"
                    " [RL3005]"
                )
    if auto.eos_token_id != tokenizer.eos_token_id:
        raise ValueError(
            f"{folder}: the end-of-sequence token is {tokenizer.eos_token!r} by "
            f"tokenizer_config.json and {auto.eos_token!r} for AutoTokenizer, which takes the "
            f"default of {type(auto).__name__}: write eos_token into tokenizer_config.json"
            " [RL3005]"
        )


_REMEDY = (
    "They must agree, or the model is trained on text that it never saw. Where tokenizer.json is "
    'right, as in distilled folders, write "tokenizer_class": "PreTrainedTokenizerFast" into '
    "tokenizer_config.json (with model_type qwen2 transformers ignores it and makes Qwen's own); "
    "where it is not, fetch the tokenizer's files again"
)


def _probes(special: Iterable[str]) -> Iterator[str]:
    yield from PROBES
    for token in special:
        yield f"a {token} b{token}\n"


def _ids(tokenizer: Any, text: str, special: bool = False) -> list[int]:
    return list(tokenizer(text, add_special_tokens=special)["input_ids"])


def _decoded(tokenizer: Any, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _differ(tokenizer: Any, text: str, special: bool = False) -> str:
    ids = _ids(tokenizer, text, special)
    return f"of {text!r} its tokenizer makes {_shown(ids, _decoded(tokenizer, ids))}"


def _shown(ids: Sequence[int], decoded: str) -> str:
    more = ", ..." if len(ids) > NUM_SHOWN else ""
    listed = ", ".join(map(str, ids[:NUM_SHOWN]))
    return f"{len(ids)} ids [{listed}{more}] ({decoded!r})"
