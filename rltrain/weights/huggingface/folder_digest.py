"""What tells whether two nodes have the same model folder, without reading the weights.

Configuration, tokenizer and the index of the weights by their content; files of weights by size.
Weights of the same size with other content are not noticed: hashing them takes as long as loading.
"""

from pathlib import Path

from rltrain.weights.huggingface.manifest import manifest_entry

READ_BELOW = 64 * 2**20
"""Bytes; larger files are told by their size."""


def folder_digest(folder: Path) -> dict[str, str]:
    """By name, what each file of a model folder is; empty where there is no such folder."""
    digest = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if not path.is_file() or path.name.startswith("."):
            continue
        size = path.stat().st_size
        whole = size < READ_BELOW and path.suffix in (".json", ".model", ".txt", ".jinja")
        content = f", sha256 {manifest_entry(path)['sha256'][:16]}" if whole else ""
        digest[path.name] = f"{size} bytes{content}"
    return digest
