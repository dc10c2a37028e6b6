"""Architectures beside `tiny.ARCH`: how DeepSeek-V3 routes, its attention and its extra layers."""

from dataclasses import replace

from rltrain.weights.architecture import MLA, Architecture
from tests.distributed.tiny import ARCH

# A dense layer first; 4 experts of 8 in the 2 best of 4 groups.
DEEPSEEK = replace(
    ARCH,
    family="deepseek_v3",
    num_layers=4,
    num_experts=16,
    experts_per_token=4,
    moe_layers=(1, 2, 3),
    score_function="sigmoid",
    expert_bias=True,
    num_groups=4,
    groups_per_token=2,
    routed_scaling=2.5,
    shared_expert_size=16,
    qk_norm=False,
)
LATENT = replace(
    DEEPSEEK,
    num_kv_heads=4,
    head_dim=12,
    qk_norm=True,
    mla=MLA(q_lora_rank=20, kv_lora_rank=14, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=10),
)
WITH_MTP = replace(LATENT, mtp_layers=2)
ARCHS: dict[str, Architecture] = {
    "softmax": ARCH,
    "sigmoid": DEEPSEEK,
    "latent": LATENT,
    "mtp": WITH_MTP,
}
