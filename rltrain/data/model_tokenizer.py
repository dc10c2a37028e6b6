"""Loads the tokenizer of a run, without torch if possible.

So transformers is imported by the functions that need it.
"""

from pathlib import Path
from typing import Any

from rltrain.config.bounded_files import MOST_OF_TABLES, check_size
from rltrain.config.model import ModelConfig
from rltrain.data.tokenizer import tiny_tokenizer

TOKENIZER = "tokenizer.json"
_SOURCES = (TOKENIZER, "tokenizer.model", "vocab.json", "tekken.json", "tiktoken.model")


def load_tokenizer(model: ModelConfig) -> Any:
    """The tokenizer of ``model.path``, or the tiny model's.

    A ``tokenizer.json`` is loaded directly, without importing torch. AutoTokenizer of transformers
    imports torch, and may load another tokenizer from the same folder:
    `rltrain.data.tokenizer_checks.check_auto_tokenizer` compares the two.

    Raises:
        ValueError: the folder has no tokenizer, or one that cannot be read.
    """
    if model.path is None:
        return tiny_tokenizer()
    folder = Path(model.path).expanduser()
    if not model.trust_remote_code and (folder / TOKENIZER).is_file():
        from transformers.tokenization_utils_tokenizers import TokenizersBackend

        return _loaded(TokenizersBackend, folder)
    return load_auto_tokenizer(folder, trust_remote_code=model.trust_remote_code)


def load_auto_tokenizer(folder: Path, *, trust_remote_code: bool) -> Any:
    """The tokenizer that AutoTokenizer loads from the folder. Raises as `load_tokenizer`."""
    from transformers import AutoTokenizer

    return _loaded(AutoTokenizer, folder, trust_remote_code=trust_remote_code)


def _loaded(loader: Any, folder: Path, **options: Any) -> Any:
    for file in folder.glob("*"):
        if file.name in _SOURCES or file.suffix in (".json", ".jinja"):
            check_size(file, MOST_OF_TABLES)
    try:
        return loader.from_pretrained(str(folder), local_files_only=True, **options)
    except Exception as error:  # `tokenizers` raises nothing more special
        if not any((folder / name).is_file() for name in (*_SOURCES, "tokenizer_config.json")):
            raise ValueError(
                f"{folder} has no tokenizer: expected {' or '.join(_SOURCES)}. Copy the files of "
                "the model's tokenizer there"
                " [RL3005]"
            ) from error
        raise ValueError(
            f"{folder}: its tokenizer cannot be loaded: {type(error).__name__}: {error} [RL3005]"
        ) from error
