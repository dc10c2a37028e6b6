"""Model folders as people have them, without weights, made here."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from rltrain.config import Config
from rltrain.controller.checks.model_checks import read_model
from rltrain.data.tokenizer import VOCAB_SIZE, tiny_tokenizer

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


def save_model(folder: Path, tokenizer: Any = None, **changes: Any) -> Path:
    """The tiny model's folder as far as it is read before the weights; its tokenizer by default."""
    sizes = read_model(Config())
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_hidden_layers": sizes.num_layers,
        "hidden_size": sizes.hidden_size,
        "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.num_kv_heads,
        "head_dim": sizes.head_dim,
        "intermediate_size": sizes.ffn_size,
        "moe_intermediate_size": sizes.expert_size,
        "num_experts": sizes.num_experts,
        "num_experts_per_tok": sizes.experts_per_token,
        "norm_topk_prob": True,
        "vocab_size": VOCAB_SIZE,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        "max_position_embeddings": 2048,
    }
    (tokenizer or tiny_tokenizer()).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


def with_template(template: str, **tokens: str) -> Any:
    """The tiny tokenizer with another chat template, or other special tokens."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    for name, token in tokens.items():
        setattr(tokenizer, name, token)
    return tokenizer
