"""Weight sync on GPUs: bitwise what a fresh engine loads, and what it then generates.

    python tests/gpu/test_weight_sync.py FOLDER [ipc] [broadcast]       # where there is no pytest

Sender processes hold three sets of random weights and hand them out as the policy's ranks do: one
by CUDA IPC on the engine's GPU, or two, a pipeline stage each, by NCCL from another GPU. The engine
(eager and with CUDA graphs) is put to sleep at level 2, which forgets its weights, and synced to
sets 1, 2 and 1 again. After each sync its tensors and log-probabilities must be those of an engine
that was started on that set.
"""

import json
import multiprocessing
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SETS = (0, 1, 2)
SYNCS = (1, 2, 1)
MODES = ("eager", "graphs")
BUCKET_BYTES = 4 * 2**20  # so that layers span buckets, and each slot is filled several times
PROMPTS = [{"prompt_token_ids": [7, 3, 11, 5 + i, 2]} for i in range(8)]


def save_models(folder: Path) -> None:
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    for seed in SETS:
        torch.manual_seed(seed)
        config = Qwen3MoeConfig(
            vocab_size=500,
            hidden_size=256,
            intermediate_size=512,
            moe_intermediate_size=128,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            num_experts=32,
            num_experts_per_tok=4,
            norm_topk_prob=True,
            decoder_sparse_step=1,
            max_position_embeddings=256,
            tie_word_embeddings=False,
            initializer_range=0.1,
        )
        Qwen3MoeForCausalLM(config).bfloat16().save_pretrained(folder / f"set{seed}")


# The sender's process


def send(pipe: Connection, folder: Path, number: int, stage: int, stages: int) -> None:
    """Answers ``begin SET`` and ``next`` until the pipe is closed, for one of the stages."""
    import torch
    from safetensors.torch import load_file

    from rltrain.weights.sync.broadcast import BroadcastGroup, BroadcastSender
    from rltrain.weights.sync.cuda_ipc import IpcSender
    from rltrain.weights.sync.stream import BucketStream

    device = torch.device("cuda", number)
    torch.cuda.set_device(device)
    sets = {seed: load_file(folder / f"set{seed}" / "model.safetensors") for seed in SETS}
    on_device = {
        seed: [(name, held[name].to(device)) for name in part(list(held), stage, stages)]
        for seed, held in sets.items()
    }
    pipe.send("ready")
    group: BroadcastGroup | None = None
    stream: BucketStream | None = None
    while (asked := pipe.recv()) != "end":
        what, *arguments = asked
        if what == "join":
            group = BroadcastGroup(*arguments, device, 60.0, 60.0)
        elif what == "begin":
            sender = (
                IpcSender(device, BUCKET_BYTES)
                if group is None
                else BroadcastSender(group, device, BUCKET_BYTES)
            )
            tensors = iter(on_device[arguments[0]])
            stream = BucketStream(tensors, sender, BUCKET_BYTES, stage=stage, stages=stages)
        elif what == "next":
            assert stream is not None
            pipe.send(stream.next_bucket())
        elif what == "close":
            assert stream is not None
            stream.close()
            pipe.send(torch.cuda.memory_allocated(device))


def part(names: list[str], stage: int, stages: int) -> list[str]:
    """The names of a stage: as many of them as of the others, in their order."""
    return names[len(names) * stage // stages : len(names) * (stage + 1) // stages]


# The engine's process


def engine_on(folder: Path, mode: str, *, sleeps: bool) -> Any:
    from vllm import LLM

    from rltrain.weights.sync import receiver

    return LLM(
        model=str(folder),
        dtype="bfloat16",
        skip_tokenizer_init=True,
        enforce_eager=mode == "eager",
        max_model_len=128,
        max_num_seqs=16,
        gpu_memory_utilization=0.1,
        kv_cache_memory_bytes=256 * 2**20,
        logprobs_mode="processed_logprobs",
        enable_sleep_mode=sleeps,
        **receiver.receiver_args(),
    )


def state(engine: Any) -> dict[str, Any]:
    """Digests of all tensors, and tokens with log-probabilities of a batch."""
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=1.0, seed=1, max_tokens=24, logprobs=0, detokenize=False, ignore_eos=True
    )
    outputs = [o.outputs[0] for o in engine.generate(PROMPTS, sampling, use_tqdm=False)]
    return {
        "digest": engine.collective_rpc("weight_digest")[0],
        "tokens": [list(o.token_ids) for o in outputs],
        "logprobs": [
            [at[token].logprob for token, at in zip(o.token_ids, o.logprobs, strict=True)]
            for o in outputs
        ],
    }


def fresh(folder: Path, mode: str, seed: int) -> None:
    engine = engine_on(folder / f"set{seed}", mode, sleeps=False)
    (folder / f"fresh-{mode}-{seed}.json").write_text(json.dumps(state(engine)))


def synced(folder: Path, mode: str, transport: str) -> None:
    from rltrain.parallel.rendezvous import Rendezvous

    context = multiprocessing.get_context("spawn")
    number, stages = (0, 1) if transport == "ipc" else (1, 2)
    pipes, senders = [], []
    for stage in range(stages):
        pipe, theirs = context.Pipe()
        sender = context.Process(
            target=send, args=(theirs, folder, number, stage, stages), daemon=True
        )
        sender.start()
        pipes.append(pipe)
        senders.append(sender)
    engine = engine_on(folder / "set0", mode, sleeps=True)
    assert [pipe.recv() for pipe in pipes] == ["ready"] * stages
    state(engine)  # as an engine that has generated before
    if transport == "broadcast":
        meetings = [Rendezvous.local(2) for _ in pipes]
        for pipe, meeting in zip(pipes, meetings, strict=True):
            pipe.send(("join", meeting, 0))
        groups = [
            {"stage": stage, "rendezvous": asdict(meeting), "ranks": [1]}
            for stage, meeting in enumerate(meetings)
        ]
        info = {"node": None, "shares": False, "groups": groups}
        info |= {"start_timeout_s": 60.0, "timeout_s": 60.0}
        engine.init_weight_transfer_engine({"init_info": info})
    for seed in SYNCS:
        engine.sleep(level=2)
        engine.wake_up(tags=["weights"])
        start = time.perf_counter()
        count = sync(engine, pipes, seed)
        seconds = time.perf_counter() - start
        engine.wake_up(tags=["kv_cache"])
        assert engine.reset_prefix_cache()
        compare(state(engine), json.loads((folder / f"fresh-{mode}-{seed}.json").read_text()))
        say(f"{transport}, {mode}, set {seed}: {count} buckets, {seconds:.3f} s, bitwise equal")
    for pipe, sender in zip(pipes, senders, strict=True):
        pipe.send("end")
        sender.join(30)


def sync(engine: Any, pipes: Sequence[Connection], seed: int) -> int:
    """As the controller syncs; returns how many buckets it took."""
    for pipe in pipes:
        pipe.send(("begin", seed))
    engine.start_weight_update()
    for pipe in pipes:
        pipe.send(("next",))
    count = 0
    for pipe in pipes:
        bucket = pipe.recv()
        while bucket is not None:
            pipe.send(("next",))  # fills the other slot while this one is loaded
            engine.update_weights({"update_info": dict(bucket)})
            bucket, count = pipe.recv(), count + 1
    engine.finish_weight_update()
    for pipe in pipes:
        pipe.send(("close",))
        say(f"a sender holds {pipe.recv() / 2**20:.0f} MiB besides its buckets")
    assert count > 4
    return count


def compare(found: dict[str, Any], expected: dict[str, Any]) -> None:
    from rltrain.weights.sync.digest import check_same

    check_same(found["digest"], expected["digest"])
    assert found["tokens"] == expected["tokens"], "other tokens than a fresh engine"
    pairs = zip(found["logprobs"], expected["logprobs"], strict=True)
    apart = max(abs(a - b) for mine, theirs in pairs for a, b in zip(mine, theirs, strict=True))
    assert apart == 0, f"log-probabilities differ from a fresh engine's by {apart:g}"


# All of it


def say(text: str) -> None:
    sys.stdout.write(f"[{time.strftime('%H:%M:%S')}] {text}\n")
    sys.stdout.flush()


def start(folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = os.environ | {"PYTHONPATH": path, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    log = (folder / f"{'-'.join(arguments)}.log").open("wb")
    command = [sys.executable, __file__, str(folder), "--only", *arguments]
    return subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)


def run(folder: Path, transports: Sequence[str]) -> None:
    """Raises AssertionError at the end, naming every part that failed."""
    folder.mkdir(parents=True, exist_ok=True)
    save_models(folder)
    say("models saved; starting fresh engines")
    parts = {
        (mode, seed): start(folder, "fresh", mode, str(seed)) for mode in MODES for seed in (1, 2)
    }
    failed = [f"fresh {mode} {seed}" for (mode, seed), part in parts.items() if part.wait(280)]
    for transport in transports:
        for mode in MODES:
            say(f"{transport}, {mode}")
            if start(folder, "synced", mode, transport).wait(280):
                failed.append(f"{transport} {mode}")
            log = (folder / f"synced-{mode}-{transport}.log").read_text(errors="replace")
            sys.stdout.write("".join(f"  {line}\n" for line in log.splitlines()[-12:]))
    assert not failed, f"failed: {failed}; see the logs in {folder}"
    say("all bitwise equal")


def main(folder: Path, *arguments: str) -> None:
    if arguments[:1] != ("--only",):
        return run(folder, arguments or ("ipc",))
    what, mode, last = arguments[1:]
    try:
        if what == "fresh":
            fresh(folder, mode, int(last))
        else:
            synced(folder, mode, last)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)  # vLLM's own threads may outlive what is asked of them


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute(), *sys.argv[2:])
elif __name__ != "__mp_main__":  # the sender's process, which reads this file too
    import pytest
    import torch

    pytestmark = [
        pytest.mark.gpu,
        pytest.mark.timeout(1200),
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    ]

    def test_ipc(tmp_path: Path) -> None:
        run(tmp_path, ["ipc"])

    @pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
    def test_broadcast(tmp_path: Path) -> None:
        run(tmp_path, ["broadcast"])
