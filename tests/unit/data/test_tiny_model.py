"""The tiny model is an ordinary Hugging Face folder, cached by content and written whole."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from rltrain.config.model import ModelConfig
from rltrain.data.cache import save_atomically
from rltrain.data.prompts import encode_response
from rltrain.data.tiny_model import (
    build_random_model,
    random_model_path,
    warm_started_path,
)
from rltrain.data.tokenizer import VOCAB_SIZE, tiny_tokenizer

TOKENIZER = tiny_tokenizer()


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> ModelConfig:
    return ModelConfig(cache_dir=str(tmp_path_factory.mktemp("cache")))


def test_transformers_loads_it_and_it_is_of_the_promised_size(model):
    path = build_random_model(model)
    network, loading = AutoModelForCausalLM.from_pretrained(
        path, output_loading_info=True, local_files_only=True
    )
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    config = network.config
    assert config.model_type == "qwen3_moe"
    assert config.num_experts >= 8 and config.num_experts_per_tok >= 2
    assert 1e6 < sum(p.numel() for p in network.parameters()) < 3e6
    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    assert len(tokenizer) == config.vocab_size == VOCAB_SIZE
    assert config.eos_token_id == network.generation_config.eos_token_id == tokenizer.eos_token_id
    assert tokenizer("17+25=")["input_ids"] == TOKENIZER("17+25=")["input_ids"]
    chat = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "<bos><|start|>user\nhi<eos>"
    with torch.no_grad():
        tokens = tokenizer("1+1=", return_tensors="pt")["input_ids"]
        assert network(tokens).logits.isfinite().all()


def test_the_same_configuration_is_built_once_and_to_the_same_bytes(model, tmp_path):
    path = build_random_model(model)
    written = (path / "model.safetensors").stat().st_mtime_ns
    assert build_random_model(model) == path
    assert (path / "model.safetensors").stat().st_mtime_ns == written
    torch.manual_seed(1234)
    again = build_random_model(model.model_copy(update={"cache_dir": str(tmp_path)}))
    for file in path.iterdir():
        assert file.read_bytes() == (again / file.name).read_bytes(), file.name


def test_what_changes_the_weights_changes_the_path(model):
    tiny = model.tiny
    seed = model.model_copy(update={"tiny": tiny.model_copy(update={"seed": 1})})
    warm_start = tiny.warm_start.model_copy(update={"steps": 7})
    steps = model.model_copy(update={"tiny": tiny.model_copy(update={"warm_start": warm_start})})
    assert random_model_path(seed) != random_model_path(model) == random_model_path(steps)
    assert len({warm_started_path(m) for m in (model, seed, steps)}) == 3
    assert random_model_path(model) != warm_started_path(model)


def test_a_failed_build_leaves_nothing_behind(tmp_path):
    def fail(folder):
        (folder / "half").write_text("x")
        raise KeyError("broken")

    with pytest.raises(KeyError):
        save_atomically(tmp_path / "model", fail)
    assert list(tmp_path.iterdir()) == []


def test_a_cache_that_cannot_be_written_names_the_option(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"cannot write to .*file.*set model.cache_dir"):
        build_random_model(ModelConfig(cache_dir=str(tmp_path / "file")))


@settings(max_examples=50)
@given(text=st.text())
def test_any_text_survives_the_tokenizer(text):
    tokens = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    assert all(0 <= token < VOCAB_SIZE for token in tokens)
    assert TOKENIZER.decode(tokens) == text


def test_a_supervised_response_ends_as_a_sampled_one_does():
    tokens = encode_response("42", TOKENIZER)
    assert tokens[-1] == TOKENIZER.eos_token_id and len(tokens) == 3
    assert TOKENIZER.decode(tokens, skip_special_tokens=True) == "42"
