"""A pad token that is an end-of-sequence token: the last one stays in loss and length.

Trainers that mask or strip padding by its id lose it, and the model unlearns to end.
"""

import json
from pathlib import Path

from rltrain.controller.checks.model_checks import read_model
from rltrain.controller.run_data import examine
from rltrain.controller.sft import supervised_batch
from rltrain.data.tokenizer import EOS, tiny_tokenizer
from rltrain.main import compose
from rltrain.rollout.generator import build_batch
from rltrain.rollout.requests import Rollout
from tests.unit.data.model_folders import save_model

END = tiny_tokenizer().eos_token_id


def test_of_taught_answers(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = EOS
    ends = {"eos_token_id": END, "pad_token_id": END}
    folder = save_model(tmp_path / "model", tokenizer, **ends)
    (folder / "generation_config.json").write_text(json.dumps(ends))
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "9+9=", "answer": "18"}\n' * 3)
    few = ["data.eval_size=1", "trainer.prompts_per_step=1", "trainer.mini_batches=1"]
    overrides = ["+recipe=sft_tiny", "data=jsonl", f"data.path={file}", f"model.path={folder}"]
    config = compose([*overrides, *few])
    found = examine(config, read_model(config))
    assert found.fault is None and found.tokenizer.pad_token_id == END
    batch = supervised_batch(found.problems.train, config)
    (problem,) = found.problems.train
    assert batch.tokens[-1] == END == problem.target_tokens[-1]
    (mask,) = batch.require("loss_mask")
    assert mask.sum() == len(problem.answer) + 1 and mask[-1]
    (weights,) = batch.require("loss_weights")
    assert weights[-1] == weights[mask].mean() > 0


def test_of_sampled_responses() -> None:
    ended = Rollout((1, 5), (7, END), (-0.5, -0.25), "stop", 0, None)
    at_once = Rollout((1, 5), (END,), (-0.125,), "stop", 0, None)
    batch = build_batch([ended, at_once], group_size=2)
    assert batch.tokens.tolist() == [1, 5, 7, END, 1, 5, END]
    assert batch.seq_lens.tolist() == [4, 3]
    assert batch.response_mask.tolist() == [False, False, True, True, False, False, True]
    assert batch.require("rollout_logprobs")[0].tolist() == [0, 0, -0.5, -0.25, 0, 0, -0.125]
