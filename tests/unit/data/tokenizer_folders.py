"""Folders with a tokenizer as people have them, made here: a ByteLevel BPE with merges."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

ROWS = 400
"""Of the embedding that the folder's ``config.json`` declares."""
TEXT = "The answer is 42 and it is right. hello world the sum of numbers. line\n\n"


def byte_level(*added: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<pad>", "<bos>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 20, trainer)
    tokenizer.add_tokens(list(added))
    return tokenizer


def save(folder: Path, tokenizer: Tokenizer, model_type: str = "llama", **settings: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **names, **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, "vocab_size": ROWS}))
    return folder
