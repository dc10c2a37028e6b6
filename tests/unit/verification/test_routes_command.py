"""The subcommands of ``rltrain routes`` that start nothing, and what the others reject."""

import json
import re
from collections import defaultdict
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from rltrain.cli.app import main
from rltrain.config.policy import ParallelConfig
from rltrain.parallel.layer_map import Pipeline
from rltrain.parallel.token_layout import PAD, TokenGrid, layout_tokens
from rltrain.routing.codec import decode
from rltrain.verification.layout_models import MODELS
from rltrain.verification.pass_file import Pass
from rltrain.verification.routes_arguments import (
    PassOptions,
    TokenSource,
    parse_layout,
    parse_sizes,
)
from rltrain.verification.routes_file import Routes
from rltrain.verification.routes_passes import (
    check_replayable,
    policy_config,
    read_tokens,
    resolve_model,
)
from rltrain.weights.architecture.decoder import Architecture

LENS = (9, 5, 1)
N = sum(LENS)


def some_routes(**fields: Any) -> Routes:
    """Of tiny:qwen3: 4 layers, 2 of 8 experts."""
    ids = torch.rand(N, 4, 8, generator=torch.Generator().manual_seed(0)).topk(2).indices
    values: dict[str, Any] = {
        "ids": ids.to(torch.uint8),
        "route_mask": torch.ones(N, dtype=torch.bool),
        "seq_lens": torch.tensor(LENS),
        "tokens": torch.arange(N) + 20,
        "layers": (0, 1, 2, 3),
        "num_experts": 8,
        "weight_version": 0,
        "producer": "a test",
    }
    return Routes(**values | fields)


def some_pass(**fields: Any) -> Pass:
    g = torch.Generator().manual_seed(0)
    values: dict[str, Any] = {
        "tokens": torch.arange(N),
        "seq_lens": torch.tensor(LENS),
        "logprobs": -torch.rand(N, generator=g),
        "loss": torch.tensor(0.5, dtype=torch.float64),
        "gradients": {"a": torch.rand(3, 2, generator=g), "b": torch.rand(4, generator=g)},
        "about": "made up",
    }
    return Pass(**values | fields)


def routes(*arguments: object) -> int:
    return main(["routes", *map(str, arguments)])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    some_routes().save(tmp_path / "r.safetensors")
    return tmp_path / "r.safetensors"


# Parsing


def test_a_layout_is_that_of_the_configuration() -> None:
    assert parse_layout("") == ParallelConfig()
    assert parse_layout("tp=2, pp=2,vpp=2") == ParallelConfig(tp=2, pp=2, vpp=2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tp=2,tq=2", r"--layout tp=2,tq=2: .*tp, pp, .* found 'tq=2'"),
        ("tp=2,tp=4", "once at most, found 'tp=4'"),
        ("tp", "found 'tp'"),
        ("tp=-1", "found 'tp=-1'"),
        ("tp=0", "--layout tp=0: tp"),
        ("ep=2", "--layout ep=2: .*does not divide"),
        ("vpp=2", "pp=1 is a single stage"),
    ],
)
def test_a_wrong_layout_is_named(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_layout(text)


def test_sizes_may_be_zero() -> None:
    assert parse_sizes("cp=0,pp=1", "--rank", ["cp", "pp"]) == {"cp": 0, "pp": 1}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("none", {"recompute": "none"}),
        ("full", {"recompute": "full", "recompute_method": "uniform"}),
        ("block", {"recompute": "full", "recompute_method": "block"}),
        ("moe+core_attn", {"recompute": "selective", "recompute_modules": ["moe", "core_attn"]}),
    ],
)
def test_recomputation(text: str, expected: dict[str, Any]) -> None:
    policy = policy_config(PassOptions(recompute=text, max_tokens=99)).model_dump()
    assert policy.items() >= expected.items()
    assert (policy["max_tokens_per_micro_batch"], policy["precision"]["params"]) == (99, "fp32")


def test_unknown_recomputation() -> None:
    with pytest.raises(ValueError, match="recompute_modules"):
        policy_config(PassOptions(recompute="moa"))


def test_models() -> None:
    assert resolve_model("tiny:deepseek mla") == (MODELS["deepseek mla"], None)
    with pytest.raises(ValueError, match=r"tiny:qwen4: expected .* tiny:qwen3"):
        resolve_model("tiny:qwen4")
    with pytest.raises(ValueError, match="does not exist"):
        resolve_model("/nowhere")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[[1, 2], [3.5]]", r"t\.json: expected a JSON list of lists"),
        ("[1, 2]", "expected a JSON list of lists"),
        ('["ab"]', "expected a JSON list of lists"),
        ("[[1, true]]", "expected a JSON list of lists"),
        ("{", "expected a JSON list of lists"),
        ("[]", "expected sequences of at least 1"),
        ("[[1, 2], []]", r"expected sequences .* found lengths \[2, 0\]"),
        ("[[1], [2]]", "one of 2 or more"),
        ("[[1, 61]]", r"t\.json: expected token ids from 0 to 60, found 1 to 61"),
        ("[[1, -1]]", "found -1 to 1"),
        (json.dumps([[1] * 65]), "has 65 tokens and the model takes 64"),
    ],
)
def test_tokens_that_cannot_be_read(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "t.json").write_text(content)
    source = TokenSource(tokens=str(tmp_path / "t.json"))
    with pytest.raises(ValueError, match=message):
        read_tokens("tiny:qwen3", source, MODELS["qwen3"], None)


def test_tokens_of_files_and_problems(tmp_path: Path) -> None:
    from rltrain.data.tokenizer import tiny_tokenizer

    def read(arch: Architecture, folder: Path | None, **source: Any) -> Any:
        return read_tokens("tiny:qwen3", TokenSource(**source), arch, folder)

    (tmp_path / "t.json").write_text("[[1, 2], [3]]")
    arch = MODELS["qwen3"]
    assert read(arch, None, tokens=str(tmp_path / "t.json")) == ((1, 2), (3,))
    with pytest.raises(ValueError, match="tiny:qwen3: it has no tokenizer"):
        read(arch, None, problem=3)
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    arch = replace(arch, vocab_size=272)
    [ids] = read(arch, tmp_path, problem=3)
    assert ids[-1] == tokenizer.eos_token_id
    prompt, _, answer = tokenizer.decode(ids, skip_special_tokens=True).partition("=")
    assert sum(map(int, prompt)) == int(answer)
    [ids] = read(arch, tmp_path, prompt="1+1")
    assert tokenizer.decode(ids, skip_special_tokens=True) == "1+1"
    with pytest.raises(ValueError, match="expected 0 to 10999"):
        read(arch, tmp_path, problem=11000)


@pytest.mark.parametrize("options", [[], ["--prompt", "1+1", "--problem", "0"]])
def test_tokens_come_from_one_place(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A problem of number 0 and an empty prompt count, too."""
    assert routes("record", "tiny:qwen3", tmp_path / "out", *options) == 2
    assert "expected one of --tokens, --prompt, --problem, found" in capsys.readouterr().err


def test_routes_of_another_model_are_not_replayed() -> None:
    check_replayable(some_routes(), MODELS["qwen3"], "r")
    with pytest.raises(ValueError, match=r"r: .* the routes are of another model"):
        check_replayable(some_routes(), MODELS["deepseek"], "r")
    ids = some_routes().ids.clone()
    ids[3, 2] = 5
    with pytest.raises(ValueError, match="r: 1 rows of layer 2 name an expert twice"):
        check_replayable(some_routes(ids=ids), MODELS["qwen3"], "r")


# Inspect


def test_inspect_shows_what_is_wrong(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ids = some_routes().ids.clone()
    ids[3, 1] = 7
    ids[:, 2] = 0
    mask = torch.ones(N, dtype=torch.bool)
    mask[0] = False
    some_routes(ids=ids, route_mask=mask).save(file)
    assert routes("inspect", file) == 0
    printed = capsys.readouterr().out
    assert "by a test" in printed and "3 sequences, 15 tokens, 4 layers, 2 of 8 experts" in printed
    assert "coverage 91.67%" in printed and "layers of zeros: 2\n" in printed
    rows = {line.split()[0]: line.split()[1:] for line in printed.splitlines()[-4:]}
    assert rows["1"][0] == "1" and rows["2"] == ["14", "8", "8.00"]


def test_files_that_are_not_there_or_not_routes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    some_pass().save(tmp_path / "p")
    for command in ("inspect", "slice"):
        assert routes(command, tmp_path / "no") == 2
        assert "no: there is no such file" in capsys.readouterr().err
        assert routes(command, tmp_path / "p") == 2
        assert "p: expected routes" in capsys.readouterr().err


# Slice


@pytest.mark.parametrize("contiguous", [False, True])
def test_slice_is_what_every_rank_sees(
    file: Path, capsys: pytest.CaptureFixture[str], contiguous: bool
) -> None:
    """As `layout_tokens` and `Pipeline` say; all ranks together see every cell once."""
    saved = some_routes()
    seen: dict[tuple[int, int], list[list[int]]] = defaultdict(list)
    for tp, cp, pp, vp in product(range(2), repeat=4):
        rank = f"tp={tp},cp={cp},pp={pp},vp={vp}"
        options = ["--layout", "tp=2,cp=2,pp=2,vpp=2", "--rank", rank, "--rows", "99"]
        assert routes("slice", file, *options, *["--contiguous"] * contiguous) == 0
        head, count, _, *lines = capsys.readouterr().out.splitlines()
        layers = list(Pipeline(2, 2).chunk_layers(4, pp, vp))
        assert head == f"layers with a router: {', '.join(map(str, layers))}"
        grid = TokenGrid(2, tp, 2, cp, zigzag=not contiguous)
        index = layout_tokens(list(LENS), grid).routers.tolist()
        assert count == f"{len(index)} router rows, {index.count(PAD)} of them padding"
        assert len(lines) == len(index)
        for row, (line, token) in enumerate(zip(lines, index, strict=True)):
            number, read, read_id, *experts = line.split()
            assert int(number) == row
            assert (read, read_id) == (
                ("pad", "-") if token == PAD else (f"{token}", f"{token + 20}")
            )
            for layer, ids in zip(layers, experts, strict=True):
                seen[token, layer].append([int(e) for e in ids.split(",")])
    for token, layer in product(range(N), range(4)):
        assert seen[token, layer] == [decode(saved.ids)[token, layer].tolist()]


def test_slice_of_rows_without_a_route(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mask = torch.ones(N, dtype=torch.bool)
    mask[1] = False
    some_routes(route_mask=mask).save(file)
    assert routes("slice", file) == 0
    lines = capsys.readouterr().out.splitlines()[3:]
    assert [line.endswith("(routes natively)") for line in lines] == [False, True] + [False] * 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--layout", "tp=2", "--rank", "tp=2"], "--rank tp=2: expected 0 to 1 by --layout"),
        (["--rank", "dp=0"], "found 'dp=0'"),
        (["--num-layers", "3"], "--num-layers 3: .* has routes of layer 3"),
        (["--layout", "pp=3"], r"policy\.parallel\.pp=3"),
    ],
)
def test_slices_that_are_not_there(
    file: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert routes("slice", file, *options) == 2
    assert re.search(message, capsys.readouterr().err)


# Compare


def compared(tmp_path: Path, a: Any, b: Any, *options: str) -> int:
    a.save(tmp_path / "a")
    b.save(tmp_path / "b")
    return routes("compare", tmp_path / "a", tmp_path / "b", *options)


def test_passes_within_and_beyond_the_tolerance(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    same = some_pass()
    assert compared(tmp_path, same, same) == 0
    assert "within the tolerance of 0.0001" in capsys.readouterr().out
    b = same.gradients["b"]
    off = some_pass(gradients={**same.gradients, "b": b + 1e-2 * b.max() * (b == b.max())})
    assert compared(tmp_path, same, off) == 1
    printed = capsys.readouterr().out
    assert "1.0e-02  gradient of b\n" in printed and "NOT within" in printed
    assert compared(tmp_path, same, off, "--tolerance", "0.02") == 0
    assert compared(tmp_path, same, some_pass(loss=same.loss * 1.001)) == 1
    logprobs = same.logprobs.clone()
    logprobs[4] -= 0.1
    assert compared(tmp_path, same, some_pass(logprobs=logprobs)) == 1
    assert "log-probabilities, of token 4\n" in capsys.readouterr().out
    assert compared(tmp_path, same, some_pass(logprobs=logprobs * torch.nan)) == 1
    assert "inf  log-probabilities" in capsys.readouterr().out


def test_a_changed_row_of_routes_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = some_routes().ids.clone()
    ids[10, 2] = torch.tensor([e for e in range(8) if e not in ids[10, 2].tolist()][:2])
    other = some_routes(ids=ids)
    assert compared(tmp_path, some_routes(), some_routes()) == 0
    assert compared(tmp_path, some_routes(), other) == 1
    printed = capsys.readouterr().out
    assert "K/E = 2/8 = 0.250" in printed and "neither file has margins" in printed
    assert f"first at row 1 (token 30), layer 2: A {some_routes().ids[10, 2].tolist()}" in printed
    tie = some_routes(margins=torch.full((N, 4), 0.005))
    assert compared(tmp_path, tie, other) == 0
    assert ", a near-tie\n" in capsys.readouterr().out
    assert compared(tmp_path, tie, other, "--near-tie", "0.004") == 1


def test_files_that_do_not_go_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compared(tmp_path, some_pass(), some_routes()) == 2
    assert "one is a routes file and one a pass file" in capsys.readouterr().err
    assert compared(tmp_path, some_pass(), some_pass(tokens=torch.arange(N) + 1)) == 2
    assert "different tokens" in capsys.readouterr().err
    fewer = some_pass(gradients={"a": torch.rand(3, 2)})
    assert compared(tmp_path, some_pass(), fewer) == 2
    assert "1 parameters are in one alone or have another shape, the first b" in (
        capsys.readouterr().err
    )
    (tmp_path / "b").write_bytes(b"nothing of ours, and long enough")
    assert routes("compare", tmp_path / "a", tmp_path / "b") == 2
    assert "b: expected a safetensors file" in capsys.readouterr().err
