"""What a weight sync must contain: every tensor of the model once, in its shape, in order."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rltrain.weights.sync.delivery import Delivery, TensorForm, expected_tensors
from rltrain.weights.sync.stream import Bucket, TensorEntry
from tests.unit.weights.test_engine_fp8 import ARCH, LATENT

EXPECTED = expected_tensors(ARCH, "bfloat16", fp8=False)


def entry(name: str, form: TensorForm) -> TensorEntry:
    return TensorEntry(name=name, dtype=form.dtype, shape=list(form.shape), offset=0, nbytes=0)


def bucket(
    index: int, names: list[str], *, last: bool = False, stage: int = 0, stages: int = 1
) -> Bucket:
    return Bucket(
        transport="broadcast",
        stage=stage,
        stages=stages,
        index=index,
        last=last,
        tensors=[entry(name, EXPECTED[name]) for name in names],
        payload={},
    )


def delivered(buckets: list[Bucket]) -> Delivery:
    delivery = Delivery(ARCH, EXPECTED)
    for one in buckets:
        delivery.accept(one)
    delivery.check_ended()
    return delivery


@given(st.lists(st.integers(1, len(EXPECTED) - 1), unique=True, max_size=4).map(sorted))
def test_any_cut_into_buckets_brings_everything(cuts: list[int]) -> None:
    names, edges = list(EXPECTED), [0, *cuts, len(EXPECTED)]
    parts = [names[a:b] for a, b in pairwise(edges)]
    buckets = [bucket(i, part, last=i == len(cuts)) for i, part in enumerate(parts)]
    assert delivered(buckets).missing() == []
    for gone in range(len(buckets)):
        others = buckets[:gone] + buckets[gone + 1 :]
        with pytest.raises(ValueError, match=r"expected bucket|none of them the last"):
            delivered(others)
        renumbered = [{**b, "index": i} for i, b in enumerate(others)]
        if gone < len(cuts):
            assert delivered(renumbered).missing() == sorted(parts[gone])  # type: ignore[arg-type]
    for again in range(len(buckets)):
        with pytest.raises(
            ValueError, match=rf"found bucket {again} of .*: deliver every bucket once"
        ):
            delivered(buckets[: again + 1] + buckets[again:])


@given(st.data())
def test_stages_come_in_any_order_and_all_of_them(data: st.DataObject) -> None:
    names = list(EXPECTED)
    cuts = data.draw(st.lists(st.integers(1, len(names) - 1), unique=True, min_size=2, max_size=5))
    parts = [names[a:b] for a, b in pairwise([0, *sorted(cuts), len(names)])]
    num_stages = data.draw(st.integers(2, 3))
    owners = [*range(num_stages)] + [0] * (len(parts) - num_stages)
    owned: dict[int, list[list[str]]] = {}
    for owner, part in zip(owners, parts, strict=True):
        owned.setdefault(owner, []).append(part)
    streams = {
        stage: [
            bucket(i, part, last=i == len(of) - 1, stage=stage, stages=num_stages)
            for i, part in enumerate(of)
        ]
        for stage, of in owned.items()
    }
    order = data.draw(st.permutations(owners))
    left = {stage: iter(stream) for stage, stream in streams.items()}
    buckets = [next(left[stage]) for stage in order]
    assert delivered(buckets).missing() == []
    gone = data.draw(st.sampled_from([*streams]))
    with pytest.raises(ValueError, match=rf"none of them the last of pipeline stages \[{gone}\]"):
        delivered([b for b in buckets if b["stage"] != gone])
    other, theirs = (gone + 1) % num_stages, streams[gone][0]["tensors"]
    foreign = [
        {**b, "tensors": [*b["tensors"], *theirs]} if b is streams[other][0] else b for b in buckets
    ]
    with pytest.raises(ValueError, match=r"sent twice: .*, by pipeline stages \[\d, \d\]"):
        delivered(foreign)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f"stages 0 to {num_stages - 1}, found one of stage 0 of"):
        delivered([*buckets[:1], {**buckets[1], "stage": 0, "stages": num_stages + 1}])


def test_a_tensor_comes_once_and_in_its_form() -> None:
    first, second, *_ = EXPECTED
    with pytest.raises(ValueError, match=rf"sent twice: \['{first}'\]"):
        delivered([bucket(0, [first, second, first], last=True)])
    with pytest.raises(ValueError, match=rf"sent twice: \['{first}'\]"):
        delivered([bucket(0, [first]), bucket(1, [second, first], last=True)])
    form = EXPECTED[first]
    for other in (TensorForm("float32", form.shape), TensorForm(form.dtype, form.shape[::-1])):
        changed = {**bucket(0, [], last=True), "tensors": [entry(first, other)]}
        with pytest.raises(ValueError, match=rf"expected {first} as bfloat16 of shape \[300, 160"):
            delivered([changed])  # type: ignore[list-item]
    unknown = {**bucket(0, [], last=True), "tensors": [entry("model.other", form)]}
    with pytest.raises(ValueError, match=r"tensors of a qwen3_moe, found model\.other"):
        delivered([unknown])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="after 1 buckets, none of them the last"):
        delivered([bucket(0, list(EXPECTED))])


def test_what_is_refused_counts_as_not_brought() -> None:
    first, second, *_ = EXPECTED
    delivery = Delivery(ARCH, EXPECTED)
    with pytest.raises(ValueError, match="sent twice"):
        delivery.accept(bucket(0, [first, first]))
    other = entry(first, TensorForm("float32", EXPECTED[first].shape))
    with pytest.raises(ValueError, match="found float32"):
        delivery.accept({**bucket(0, [second]), "tensors": [other]})
    delivery.accept(bucket(0, [first, second], last=True))
    assert delivery.names == {first, second} and first not in delivery.missing()


def test_layers_that_predict_further_tokens_may_come_and_need_not() -> None:
    arch = replace(ARCH, skipped_mtp_layers=1)
    of_mtp = [entry("model.layers.2.eh_proj.weight", TensorForm("bfloat16", (3,)))]
    delivery = Delivery(arch, expected_tensors(arch, "bfloat16", fp8=False))
    everything = bucket(0, list(EXPECTED), last=True)
    delivery.accept({**everything, "tensors": everything["tensors"] + of_mtp})
    assert delivery.missing() == []


def test_buffers_keep_fp32_and_blocks_have_scales() -> None:
    plain = expected_tensors(LATENT, "bfloat16", fp8=False)
    [bias] = [name for name in plain if name.endswith("e_score_correction_bias")]
    assert plain[bias] == TensorForm("float32", (LATENT.num_experts,))
    assert {form.dtype for name, form in plain.items() if name != bias} == {"bfloat16"}
    blocks = expected_tensors(LATENT, "bfloat16", fp8=True)
    down = "model.layers.1.mlp.experts.3.down_proj.weight"
    assert blocks[down] == TensorForm("float8_e4m3fn", (160, 128))
    assert blocks[f"{down}_scale_inv"] == TensorForm("float32", (2, 1))
    assert blocks["model.embed_tokens.weight"] == TensorForm("bfloat16", (300, 160))
