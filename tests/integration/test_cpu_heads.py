"""The head sizes allowed on CPUs are those that the kernels of the installed vLLM support."""

import subprocess
import sys

import pytest
import torch

from rltrain.controller.checks.engine_shapes import CPU_ATTENTION, UNLISTED, cpu_head_sizes

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(torch.cuda.is_available(), reason="CPU"),
]
ASK = """
import torch
from vllm import _custom_ops as ops
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

current_platform.import_kernels()
for size in range(8, 600, 8):
    try:
        ops.cpu_attn_get_scheduler_metadata(
            num_reqs=1, num_heads=4, num_kv_heads=2, head_dim=size, dtype=torch.bfloat16,
            seq_lens=torch.tensor([5], dtype=torch.int32),
            query_start_loc=torch.tensor([0, 5], dtype=torch.int32),
            causal=True, sliding_window_size=-1, enable_kv_split=False,
            isa=_get_attn_isa(torch.bfloat16, 128, size),
        )
    except Exception as error:
        assert "head_dim" in str(error), error
    else:
        print("size", size)
"""


def test_the_kernels_have_these_sizes() -> None:
    done = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("size ")]
    taken = tuple(int(size) for _, size in lines)
    assert taken == cpu_head_sizes(CPU_ATTENTION, UNLISTED)
