"""A tokenizer that makes other tokens than the model knows is refused, with text and ids."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from rltrain.config.model import ModelConfig
from rltrain.data.model_tokenizer import load_tokenizer
from rltrain.data.problem import Problem
from rltrain.data.tokenizer import VOCAB_SIZE
from rltrain.data.tokenizer_checks import (
    PROBES,
    check_auto_tokenizer,
    check_round_trip,
    check_tokenizer,
)
from rltrain.data.vocabulary import check_ids, check_special_ids, check_vocabulary
from tests.unit.data.model_folders import ROWS, byte_level, save


def load(folder: Path) -> Any:
    return load_tokenizer(ModelConfig(path=str(folder)))


def check(folder: Path) -> None:
    """All checks of a folder's tokenizer."""
    tokenizer = load(folder)
    check_tokenizer(tokenizer, folder)
    check_vocabulary(tokenizer, ROWS, folder, ())
    check_special_ids(tokenizer, folder, ROWS, supervised=True)
    check_auto_tokenizer(tokenizer, folder)


@pytest.mark.parametrize("settings", [{}, {"model_max_length": 4, "padding_side": "left"}])
def test_a_byte_level_tokenizer_is_read_as_its_file_says(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    raw = byte_level()
    raw.enable_truncation(4)  # as a file may have it; no prompt is cut or filled
    raw.enable_padding(length=40)
    check(save(tmp_path, raw, **settings))
    raw.no_truncation()
    raw.no_padding()
    for text in PROBES:
        assert load(tmp_path)(text, add_special_tokens=False)["input_ids"] == raw.encode(text).ids


def test_a_distilled_folder_is_refused_with_the_difference(tmp_path: Path) -> None:
    """``model_type: llama`` makes AutoTokenizer build a Llama tokenizer of a ByteLevel file."""
    folder = save(tmp_path, byte_level(), tokenizer_class="LlamaTokenizerFast")
    with pytest.raises(
        ValueError, match="LlamaTokenizer, which AutoTokenizer takes it for"
    ) as error:
        check(folder)
    said = str(error.value)
    assert "of 'The answer is 42, and it is  right.' its tokenizer makes 11 ids [" in said
    assert "('The answer is 42, and it is  right.')" in said
    assert "('Theansweris42,anditisright.')" in said
    # What it says helps.
    assert '"tokenizer_class": "PreTrainedTokenizerFast" into tokenizer_config.json' in said
    check(save(tmp_path, byte_level(), tokenizer_class="PreTrainedTokenizerFast"))


def test_another_class_may_split_digits_otherwise(tmp_path: Path) -> None:
    for name in ("Qwen2Tokenizer", "PreTrainedTokenizerFast"):
        folder = save(tmp_path, byte_level(), "qwen2", tokenizer_class=name)
        with pytest.raises(ValueError, match="Qwen2Tokenizer, which AutoTokenizer takes it for"):
            check(folder)


def test_the_file_is_the_measure(tmp_path: Path) -> None:
    folder = save(tmp_path, byte_level())
    tokenizer = load(folder)
    other = byte_level()
    other.normalizer = normalizers.Lowercase()
    other.save(str(folder / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"its tokenizer makes \d+ ids .* tokenizer.json \d+ ids"):
        check_tokenizer(tokenizer, folder)


def test_a_tokenizer_that_loses_spaces(tmp_path: Path) -> None:
    """As transformers 5 saves one that it has converted wrongly: file and tokenizer agree."""
    raw = Tokenizer(models.WordLevel({"<eos>": 0, "the": 1}, unk_token="<eos>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    raw.decoder = decoders.Fuse()
    with pytest.raises(ValueError, match="loses spaces: it makes"):
        check_tokenizer(load(save(tmp_path, raw)), tmp_path)
    check_round_trip(load_tokenizer(ModelConfig()), "the tiny model")


def test_tokens_without_a_row(tmp_path: Path) -> None:
    added = [f"<extra_{i}>" for i in range(ROWS)]
    raw = byte_level(*added)
    first = added[ROWS - raw.get_vocab_size(with_added_tokens=False)]
    tokenizer = load(save(tmp_path, raw))
    total = raw.get_vocab_size()
    answer = (
        rf"has {total - ROWS} tokens without a row .*\({ROWS} '{first}', .* from 0 to {ROWS - 1}"
    )
    with pytest.raises(ValueError, match=answer):
        check_vocabulary(tokenizer, ROWS, tmp_path, ())
    ids = tuple(tokenizer(f"go {first}", add_special_tokens=False)["input_ids"])
    uses = Problem(ids, f"go {first}", "42", place="a.jsonl, row 3")
    where = (
        rf"a.jsonl, row 3, prompt 'go {first}': token {len(ids) - 1} has id {ROWS} '{first}', "
        rf".*{ROWS} rows"
    )
    with pytest.raises(ValueError, match=where):
        check_vocabulary(tokenizer, ROWS, tmp_path, [("train", uses)])
    taught = Problem((5,), "go", first)
    with pytest.raises(ValueError, match=rf"train, answer '{first}': token 0 has id {ROWS}"):
        check_vocabulary(tokenizer, ROWS, tmp_path, [("train", taught)])
    check_vocabulary(tokenizer, total, tmp_path, [("train", uses), ("train", taught)])
    check_vocabulary(tokenizer, total + 100, tmp_path, ())  # rows that pad the embedding


@pytest.mark.parametrize("ids", [(3, -1), (VOCAB_SIZE,), (0, VOCAB_SIZE - 1, 2**40)])
def test_ids_outside_of_the_embedding(ids: tuple[int, ...]) -> None:
    at = len(ids) - 1
    with pytest.raises(ValueError, match=rf"here: token {at} has id {ids[at]}, and .* 272 rows"):
        check_ids(ids, VOCAB_SIZE, "here")
    check_ids((), VOCAB_SIZE, "here")
    check_ids((0, VOCAB_SIZE - 1), VOCAB_SIZE, "here")


@pytest.mark.parametrize(
    ("file", "field", "value"),
    [
        ("generation_config.json", "eos_token_id", [2, ROWS]),
        ("generation_config.json", "eos_token_id", -1),
        ("config.json", "eos_token_id", ROWS),
        ("config.json", "eos_token_id", "<eos>"),
        ("config.json", "eos_token_id", True),
        ("config.json", "bos_token_id", ROWS + 7),
        ("generation_config.json", "pad_token_id", ROWS),
    ],
)
def test_special_ids_outside_of_the_embedding(
    file: str, field: str, value: object, tmp_path: Path
) -> None:
    folder = save(tmp_path, byte_level())
    (folder / file).write_text(json.dumps({"model_type": "llama", field: value}))
    with pytest.raises(ValueError, match=rf"{file}: {field}=.*expected ids from 0 to {ROWS - 1}"):
        check_special_ids(load(folder), folder, ROWS, supervised=False)


def test_special_ids_as_folders_have_them(tmp_path: Path) -> None:
    folder = save(tmp_path, byte_level())
    settings = {"eos_token_id": [2, 0], "pad_token_id": -1, "bos_token_id": None}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    check_special_ids(load(folder), folder, ROWS, supervised=True)
    check_special_ids(load_tokenizer(ModelConfig()), None, VOCAB_SIZE, supervised=True)


def test_something_must_end_a_response(tmp_path: Path) -> None:
    folder = save(tmp_path, byte_level(), eos_token=None)
    tokenizer = load(folder)
    assert tokenizer.eos_token_id is None
    for supervised in (False, True):
        with pytest.raises(ValueError, match="no end-of-sequence token"):
            check_special_ids(tokenizer, folder, ROWS, supervised=supervised)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
    check_special_ids(tokenizer, folder, ROWS, supervised=False)  # the engine stops there
    with pytest.raises(ValueError, match="no end-of-sequence token"):
        check_special_ids(tokenizer, folder, ROWS, supervised=True)


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ValueError, match=r"has no tokenizer: expected tokenizer\.json or"):
        load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="its tokenizer cannot be loaded"):
        load(tmp_path)


def test_tokenizers_are_loaded_without_torch(tmp_path: Path) -> None:
    save(tmp_path, byte_level())
    code = (
        "import sys; from rltrain.config.model import ModelConfig\n"
        "from rltrain.data.model_tokenizer import load_tokenizer\n"
        f"for path in (None, {str(tmp_path)!r}):\n"
        "    load_tokenizer(ModelConfig(path=path))('a b')\n"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
