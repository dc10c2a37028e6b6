"""Whether a tokenizer makes the tokens that the model was trained on, and only such as it has."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from rltrain.data.model_tokenizer import TOKENIZER, load_auto_tokenizer
from rltrain.data.problem import Problem

SENTENCE = "The answer is 42, and it is  right."
"""Plain words: whatever a tokenizer makes of them must still be as many."""
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
"""Ids that a message shows of a text."""
_SPECIAL = ("eos_token_id", "bos_token_id", "pad_token_id")


def check_tokenizer(tokenizer: Any, folder: Path) -> None:
    """The tokenizer makes the tokens of the folder's ``tokenizer.json``, and loses no word.

    Raises:
        ValueError: with the text and what either makes of it.
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
                )
    check_round_trip(tokenizer, folder)


def check_round_trip(tokenizer: Any, where: object) -> None:
    """No space between words is lost, as with a tokenizer that was converted wrongly."""
    decoded = _decoded(tokenizer, ids := _ids(tokenizer, SENTENCE))
    if len(decoded.split()) < len(SENTENCE.split()):
        raise ValueError(
            f"{where}: its tokenizer loses spaces: it makes {_shown(ids, decoded)} of "
            f"{SENTENCE!r}. {_REMEDY}"
        )


def check_auto_tokenizer(tokenizer: Any, folder: Path, *, trust_remote_code: bool) -> None:
    """What transformers' AutoTokenizer makes of the folder is the same tokenizer: vLLM loads it so,
    and whoever evaluates or serves the trained model.

    Imports torch, which takes seconds.

    Raises:
        ValueError: with the text and what either makes of it.
    """
    auto = load_auto_tokenizer(folder, trust_remote_code=trust_remote_code)
    for text in _probes(tokenizer.all_special_tokens):
        for special in (False, True):
            ours, theirs = _ids(tokenizer, text, special), _ids(auto, text, special)
            if ours != theirs:
                of_auto = _shown(theirs, _decoded(auto, theirs))
                raise ValueError(
                    f"{folder}: {_differ(tokenizer, text, special)} and transformers' "
                    f"{type(auto).__name__}, which AutoTokenizer takes it for, {of_auto}. {_REMEDY}"
                )
    if auto.eos_token_id != tokenizer.eos_token_id:
        raise ValueError(
            f"{folder}: the end-of-sequence token is {tokenizer.eos_token!r} by "
            f"tokenizer_config.json and {auto.eos_token!r} for AutoTokenizer, which takes the "
            f"default of {type(auto).__name__}: write eos_token into tokenizer_config.json"
        )


_REMEDY = (
    "They must agree, or the model is trained on text that it never saw. Where tokenizer.json is "
    'right, as in distilled folders, write "tokenizer_class": "PreTrainedTokenizerFast" into '
    "tokenizer_config.json; where it is not, fetch the tokenizer's files again"
)


def check_vocabulary(
    tokenizer: Any, rows: int, folder: Path | None, problems: Iterable[tuple[str, Problem]]
) -> None:
    """Every token has a row of the embedding.

    Args:
        rows: of the embedding, `vocab_size` in ``config.json``
        problems: what is trained on, each with the set that it is of

    Raises:
        ValueError: naming tokens without a row and the first problem that needs one.
    """
    beyond = {i: token for token, i in tokenizer.get_vocab().items() if not 0 <= i < rows}
    for name, problem in problems:
        check_ids(problem.prompt_tokens, rows, f"{name} prompt {problem.prompt[:60]!r}", tokenizer)
        if beyond and isinstance(problem.answer, str):
            place = f"{name} answer {problem.answer[:60]!r}"
            check_ids(_ids(tokenizer, problem.answer), rows, place, tokenizer)
    if beyond:
        first = ", ".join(f"{i} {beyond[i]!r}" for i in islice(sorted(beyond), 3))
        raise ValueError(
            f"{folder}: its tokenizer has {len(beyond)} tokens without a row of the model's "
            f"embedding ({first}): expected ids from 0 to {rows - 1} (vocab_size in config.json). "
            f"{_RESIZE}"
        )


def check_ids(ids: Sequence[int], rows: int, where: str, tokenizer: Any = None) -> None:
    """ValueError for the first id that has no row of the embedding."""
    if ids and not (min(ids) >= 0 and max(ids) < rows):
        at, found = next((at, i) for at, i in enumerate(ids) if not 0 <= i < rows)
        token = "" if tokenizer is None else f" {tokenizer.convert_ids_to_tokens([found])[0]!r}"
        raise ValueError(
            f"{where}: token {at} has id {found}{token}, and the model's embedding has {rows} rows "
            f"(ids 0 to {rows - 1}, vocab_size in config.json). {_RESIZE}"
        )


_RESIZE = (
    "Tokens were added to the tokenizer and not to the model: take those of the model's own folder "
    "(tokenizer.json, tokenizer_config.json, added_tokens.json), or resize the embedding with "
    "model.resize_token_embeddings and save the model"
)


def check_special_ids(tokenizer: Any, folder: Path | None, rows: int, *, taught: bool) -> None:
    """The ids that end, begin and fill sequences are rows of the embedding, and one of them ends.

    Args:
        taught: whether the tokenizer's own is appended to answers
    """
    named = {("the tokenizer", n): getattr(tokenizer, n) for n in _SPECIAL}
    if folder is not None:
        for file in ("generation_config.json", "config.json"):
            found = _read(folder / file)
            named |= {(f"{folder / file}", n): found.get(n) for n in _SPECIAL}
    for (where, name), value in named.items():
        for found in value if isinstance(value, list) else [value]:
            no_padding = name == "pad_token_id" and found == -1  # what older folders write for none
            if found is None or no_padding:
                continue
            if type(found) is not int or not 0 <= found < rows:
                raise ValueError(
                    f"{where}: {name}={value!r}: expected ids from 0 to {rows - 1}, the rows of "
                    "the model's embedding (vocab_size in config.json)"
                )
    ends = [value for (_, name), value in named.items() if name == "eos_token_id"]
    if tokenizer.eos_token_id is None and (taught or all(end in (None, []) for end in ends)):
        raise ValueError(
            f"{folder}: no end-of-sequence token: no response would ever end. Write eos_token into "
            "tokenizer_config.json, e.g. the token that ends a turn in the chat template"
        )


def _read(file: Path) -> Mapping[str, Any]:
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file}: expected a JSON object, found {type(found).__name__}")
    return found


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
