"""Weight sync into a real vLLM engine: bitwise what a fresh engine loads, or an error."""

import asyncio
import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
}

os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would override kv_cache_memory_bytes

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from vllm import LLM, AsyncEngineArgs, SamplingParams
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.v1.engine.async_llm import AsyncLLM

from rltrain.parallel.rendezvous import Rendezvous
from rltrain.patches import vllm as vllm_patches
from rltrain.weights.sync import receiver
from rltrain.weights.sync.broadcast import BroadcastGroup, BroadcastSender
from rltrain.weights.sync.digest import check_same
from rltrain.weights.sync.flat_buffers import FlatSlots, buffer_checksum
from rltrain.weights.sync.stream import Bucket, BucketStream, TensorEntry
from tests.distributed.tiny_families import make
from tests.integration.sync_group import CPU, join
from tests.integration.sync_links import NODE, links

pytestmark = [pytest.mark.integration, pytest.mark.skipif(torch.cuda.is_available(), reason="CPU")]

# Longer than a block of the KV cache, so that a prompt's first tokens are cached.
BLOCK = 32
PROMPTS = [{"prompt_token_ids": [7, 3, 11, 5 + i, 2, *range(20, 56)]} for i in range(4)]
# Five buckets or more, so that layers span them.
BUCKET_BYTES = 200_000

Weights = dict[str, torch.Tensor]
MakeModel = Callable[..., tuple[Path, Weights]]


@pytest.fixture(autouse=True)
def own_rotary_embeddings(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM shares these among the engines of a process, and a failed sync leaves them empty."""
    monkeypatch.setattr(rotary_embedding, "_ROPE_DICT", {})


def test_every_head_is_turned_as_mla_passes_them() -> None:
    vllm_patches.patch_vllm_for_cpu()
    with set_current_vllm_config(VllmConfig()):
        rotary = rotary_embedding.get_rope(
            64, 16, is_neox_style=False, rope_parameters={"rope_type": "default", "rope_theta": 1e4}
        )
    positions = torch.arange(5)
    query, key = torch.randn(5, 4, 24 + 64), torch.randn(5, 1, 64)
    expected = rotary.forward_native(positions, query[..., 24:].clone(), key.clone())
    found = rotary.forward_cpu(positions, query[..., 24:], key)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.fixture(scope="module")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    def make(
        seed: int, dtype: str, expert_size: int = 64, tied: bool = False
    ) -> tuple[Path, Weights]:
        """A folder with random weights, and its tensors as a policy would send them."""
        torch.manual_seed(seed)
        config = Qwen3MoeConfig(
            vocab_size=200,  # vLLM pads it to 256
            hidden_size=64,
            intermediate_size=96,
            moe_intermediate_size=expert_size,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            num_experts=8,
            num_experts_per_tok=2,
            norm_topk_prob=True,
            decoder_sparse_step=1,
            max_position_embeddings=128,
            tie_word_embeddings=tied,
            initializer_range=0.1,
        )
        folder = tmp_path_factory.mktemp(f"seed{seed}")
        Qwen3MoeForCausalLM(config).to(getattr(torch, dtype)).save_pretrained(folder)
        return folder, load_file(folder / "model.safetensors")

    return make


def _read(folder: Path) -> Weights:
    from safetensors.torch import load_file

    return {
        name: tensor
        for path in folder.glob("*.safetensors")
        for name, tensor in load_file(path).items()
    }


def arguments(folder: Path, dtype: str) -> dict[str, Any]:
    return {
        "model": str(folder),
        "dtype": dtype,
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "max_model_len": 64,
        "max_num_seqs": 8,
        "kv_cache_memory_bytes": 16 * 2**20,
        "block_size": BLOCK,
        "logprobs_mode": "processed_logprobs",
        "distributed_executor_backend": "uni",
        **receiver.receiver_args(),
    }


def sampling() -> SamplingParams:
    return SamplingParams(
        temperature=1.0, seed=1, max_tokens=12, logprobs=0, detokenize=False, ignore_eos=True
    )


def sampled(outputs: list[Any]) -> list[tuple[list[int], list[float]]]:
    """Tokens and log-probabilities."""
    completions = [output.outputs[0] for output in outputs]
    return [
        (
            list(c.token_ids),
            [at[token].logprob for token, at in zip(c.token_ids, c.logprobs, strict=True)],
        )
        for c in completions
    ]


def generate(engine: LLM) -> list[tuple[list[int], list[float]]]:
    return sampled(engine.generate(PROMPTS, sampling(), use_tqdm=False))


def digest(engine: LLM) -> dict[str, str]:
    return engine.collective_rpc("weight_digest")[0]


def sent(group: BroadcastGroup, weights: Weights) -> Iterator[Bucket]:
    """Each bucket on its way already, so that nobody has to read and send at a time."""
    sender = BroadcastSender(group, CPU, BUCKET_BYTES)
    stream = BucketStream(iter(weights.items()), sender, BUCKET_BYTES)
    while (bucket := stream.next_bucket()) is not None:
        sender.send()
        yield bucket
    stream.close()


def three_buckets(weights: Weights) -> tuple[list[Bucket], dict[int, torch.Tensor]]:
    """All of them at once, each in a buffer of its own; and the buffers by checksum."""
    found, buffers = [], {}
    for index in range(3):
        slots = FlatSlots(CPU, 2**24)
        names = list(weights)[index::3]
        entries, nbytes = slots.fill(0, iter([(name, weights[name]) for name in names]))
        buffer = slots.buffers[0][:nbytes]
        payload = {"nbytes": nbytes, "checksum": buffer_checksum(buffer)}
        found.append(
            Bucket(
                transport="broadcast",
                stage=0,
                stages=1,
                index=index,
                last=index == 2,
                tensors=entries,
                payload=payload,
            )
        )
        buffers[payload["checksum"]] = buffer
    return found, buffers


def sync(
    engine: LLM,
    weights: Weights,
    spoil: Callable[[BroadcastSender, Bucket], None] | None = None,
) -> None:
    """As the controller syncs: a sender is one bucket ahead, in a thread of its own.

    Of two pipeline stages the first comes by broadcast, the second through the node's memory.
    """
    senders = [
        BroadcastSender(join(engine), CPU, BUCKET_BYTES),
        BroadcastSender(None, CPU, BUCKET_BYTES, NODE),
    ]
    engine.start_weight_update()
    half, items = len(weights) // 2, list(weights.items())
    streams = [
        BucketStream(iter(part), sender, BUCKET_BYTES, stage=stage, stages=2)
        for stage, (part, sender) in enumerate(
            zip((items[:half], items[half:]), senders, strict=True)
        )
    ]
    first = [stream.next_bucket() for stream in streams]
    with ThreadPoolExecutor(1) as thread:
        for stream, sender, bucket in zip(streams, senders, first, strict=True):
            while bucket is not None:
                if spoil:
                    spoil(sender, bucket)
                following = thread.submit(stream.next_bucket)
                engine.update_weights({"update_info": dict(bucket)})
                bucket = following.result()
    engine.finish_weight_update()
    for stream in streams:
        stream.close()
    assert engine.reset_prefix_cache()  # as receiver.finish_sync does, which an AsyncLLM has


# The CPU kernel pads experts of 48 to 64. In fp32 an output head, tied or not, multiplies by a
# packed copy of its weights, which no digest sees.
@pytest.mark.parametrize(
    ("dtype", "expert_size", "tied"), [("float32", 64, True), ("bfloat16", 48, False)]
)
def test_syncs_in_a_row_equal_fresh_engines(
    make_model: MakeModel, dtype: str, expert_size: int, tied: bool
) -> None:
    engine = LLM(**arguments(make_model(0, dtype, expert_size, tied)[0], dtype))
    for seed in (1, 2):
        folder, weights = make_model(seed, dtype, expert_size, tied)
        sync(engine, weights)
        fresh = LLM(**arguments(folder, dtype))
        check_same(digest(engine), digest(fresh))
        assert generate(engine) == generate(fresh)


def test_a_sync_of_gpt_oss_reaches_experts_and_sinks(tmp_path: Path) -> None:
    """Its tensors of all experts are more than a bucket; nothing in the engine may stay zero."""
    model = make("gpt_oss").bfloat16()
    model.save_pretrained(tmp_path / "new")
    for parameter in model.parameters():
        parameter.data.zero_()
    model.save_pretrained(tmp_path / "old")
    engine = LLM(**arguments(tmp_path / "old", "bfloat16"))
    sync(engine, _read(tmp_path / "new"))
    fresh = LLM(**arguments(tmp_path / "new", "bfloat16"))
    check_same(digest(engine), digest(fresh))
    assert generate(engine) == generate(fresh)


def test_unpacked_experts_are_seen_by_the_digest(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the patch a sync raises nothing and samples from another model."""
    fresh = LLM(**arguments(make_model(1, "bfloat16")[0], "bfloat16"))
    engine = LLM(**arguments(make_model(0, "bfloat16")[0], "bfloat16"))
    patched = UnquantizedFusedMoEMethod._setup_kernel
    monkeypatch.setattr(UnquantizedFusedMoEMethod, "_setup_kernel", patched.__wrapped__)
    sync(engine, make_model(1, "bfloat16")[1])
    with pytest.raises(ValueError, match=r"4 of \d+ engine tensors differ.*w13_weight.*w2_weight"):
        check_same(digest(engine), digest(fresh))
    assert generate(engine) != generate(fresh)


def test_a_missing_expert_is_refused(make_model: MakeModel) -> None:
    folder, weights = make_model(0, "bfloat16")
    engine = LLM(**arguments(folder, "bfloat16"))
    del weights[lost := "model.layers.1.mlp.experts.5.up_proj.weight"]
    named = re.escape(f"missing ['{lost}'] (1 in all)")
    unfilled = r"model\.layers\.1\.mlp\.experts\S* \(65536 of 98304 elements\)"  # no up_proj at all
    with pytest.raises(ValueError, match=f"incomplete.*{named}.*{unfilled}"):
        sync(engine, weights)


def changed(bucket: Bucket, **fields: Any) -> list[TensorEntry]:
    """A bucket's tensors with other fields in the first of them."""
    first, *others = bucket["tensors"]
    return [{**first, **fields}, *others]  # type: ignore[typeddict-item]


SPOILT: dict[str, tuple[Callable[[list[Bucket]], list[Bucket]], str]] = {
    "twice in a bucket": (
        lambda b: [{**b[0], "tensors": [*b[0]["tensors"], b[0]["tensors"][0]]}],
        r"tensors sent twice: \['lm_head",
    ),
    "again in a later bucket": (
        lambda b: [b[0], {**b[0], "index": 1}],
        r"tensors sent twice: \['lm_head",
    ),
    "a bucket twice": (lambda b: [b[0], b[0]], "expected bucket 1, found bucket 0"),
    "in another order": (lambda b: [b[1]], "expected bucket 0, found bucket 1"),
    "after the last": (
        lambda b: [{**b[0], "last": True}, b[1]],
        "nothing after bucket 0, which was the last, found bucket 1",
    ),
    "without the last": (
        lambda b: b[:-1],
        r"finished after \d+ buckets, none of them the last",
    ),
    "another dtype": (
        lambda b: [{**b[0], "tensors": changed(b[0], dtype="float16")}],
        r"expected lm_head.weight as bfloat16 of shape \[200, 64\], found float16",
    ),
    "another shape": (
        lambda b: [{**b[0], "tensors": changed(b[0], shape=[64, 200])}],
        r"of shape \[200, 64\], found bfloat16 of shape \[64, 200\]",
    ),
    "another name": (
        lambda b: [{**b[0], "tensors": changed(b[0], name="lm_head.scale")}],
        "expected tensors of a qwen3_moe, found lm_head.scale",
    ),
}


@pytest.mark.parametrize("how", SPOILT)
def test_all_but_every_tensor_once_is_refused(make_model: MakeModel, how: str) -> None:
    """vLLM itself accepts most of these without an error."""
    folder, weights = make_model(0, "bfloat16")
    engine = LLM(**arguments(folder, "bfloat16"))
    spoil, message = SPOILT[how]
    group = join(engine)
    whole, buffers = three_buckets(weights)
    engine.start_weight_update()
    with pytest.raises(ValueError, match=message):
        for bucket in spoil(whole):
            sending = group.broadcast(buffers[bucket["payload"]["checksum"]])
            engine.update_weights({"update_info": dict(bucket)})
            sending.wait()
        engine.finish_weight_update()


def test_a_flipped_bit_is_refused_and_ends_the_engine(make_model: MakeModel) -> None:
    folder, weights = make_model(0, "bfloat16")
    engine = LLM(**arguments(folder, "bfloat16"))

    def flip(sender: BroadcastSender, bucket: Bucket) -> None:
        sender._slots.buffers[bucket["index"] % 2][40] ^= 4

    with pytest.raises(
        ValueError, match=r"bucket 0 arrived changed: expected \d+ bytes with check"
    ):
        sync(engine, weights, spoil=flip)
    with pytest.raises(RuntimeError, match="start a new engine"):
        sync(engine, weights)


def test_async_engine(make_model: MakeModel) -> None:
    """The calls the rollout actor makes; the model is in another process."""
    asyncio.run(_async_engine(*make_model(0, "bfloat16"), *make_model(1, "bfloat16")))


async def _async_engine(folder: Path, old: Weights, new_folder: Path, new: Weights) -> None:
    fresh = LLM(**arguments(new_folder, "bfloat16"))
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments(folder, "bfloat16")))
    try:
        running = asyncio.create_task(_generate_async(engine, 0))
        while not engine.output_processor.has_unfinished_requests():
            await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="requests are running"):
            await receiver.start_sync(engine)
        await running
        # What is cached of these prompts is forgotten with the weights it was computed with.
        before = await asyncio.gather(*(_generate_async(engine, i) for i in range(len(PROMPTS))))
        assert all(output.num_cached_tokens >= BLOCK for output in before[:1])
        group = await _join_async(engine, Rendezvous.local(2))
        for weights in (old, new):
            await receiver.start_sync(engine)
            for bucket in sent(group, weights):
                await receiver.load_bucket(engine, bucket)
            await receiver.finish_sync(engine)
        check_same(await receiver.engine_digest(engine), digest(fresh))
        found = await asyncio.gather(*(_generate_async(engine, i) for i in range(len(PROMPTS))))
        assert sampled(found) == generate(fresh) != sampled(before)
        with pytest.raises(Exception, match="without a matching start_weight_update"):
            await receiver.finish_sync(engine)
        with pytest.raises(Exception, match="must be called before update_weights"):
            await receiver.load_bucket(engine, bucket)

        await receiver.start_sync(engine)
        everything = sent(group, new)
        await receiver.load_bucket(engine, next(everything))
        with pytest.raises(Exception, match="expected bucket 1, found bucket 2"):
            await receiver.load_bucket(engine, Bucket(**{**next(everything), "index": 2}))
    finally:
        engine.shutdown()


async def _join_async(engine: AsyncLLM, meeting: Rendezvous) -> BroadcastGroup:
    ours = asyncio.to_thread(BroadcastGroup, meeting, 0, CPU, 60.0, 60.0)
    theirs = receiver.join_groups(engine, links(meeting))
    return (await asyncio.gather(ours, theirs))[0]


async def _generate_async(engine: AsyncLLM, index: int) -> Any:
    async for output in engine.generate(PROMPTS[index], sampling(), request_id=f"{index}"):
        final = output
    return final
