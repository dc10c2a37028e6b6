"""The tiny models that layouts are tested on. Pure."""

from dataclasses import replace

from rltrain.weights.architecture.decoder import MLA, Architecture, Yarn

# An odd vocabulary, which tp=2 has to pad; two key-value heads, which tp=2 shares out.
QWEN3_LIKE = Architecture(
    family="qwen3_moe",
    num_layers=4,
    hidden_size=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    ffn_size=48,
    vocab_size=61,
    rope_theta=10000.0,
    norm_eps=1e-6,
    tie_embeddings=False,
    max_positions=64,
    num_experts=8,
    experts_per_token=2,
    expert_size=24,
    norm_topk_prob=True,
    moe_layers=(0, 1, 2, 3),
    qk_norm="heads",
)
# A dense layer first; every token takes 4 experts of the 8 in the best 2 of 4 groups.
DEEPSEEK_LIKE = replace(
    QWEN3_LIKE,
    family="deepseek_v3",
    num_experts=16,
    experts_per_token=4,
    moe_layers=(1, 2, 3),
    score_function="sigmoid",
    expert_bias=True,
    num_groups=4,
    groups_per_token=2,
    routed_scaling=2.5,
    shared_expert_size=16,
    qk_norm="none",
)
# Values and keys differ in size, and no rank of a latent is that of another. YaRN slows rotations
# down from the eighth position on.
LATENT = replace(
    DEEPSEEK_LIKE,
    num_kv_heads=4,
    head_dim=12,
    rotary_scaling=Yarn(8.0, 8, 2.0, 0.25, mscale=1.0, mscale_all_dim=0.7),
    mla=MLA(q_lora_rank=20, kv_lora_rank=14, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=10),
)
# Windows in every other layer, and most values of the experts' activation are clamped.
GPT_OSS_LIKE = replace(
    QWEN3_LIKE,
    family="gpt_oss",
    qk_norm="none",
    linear_bias=True,
    swiglu_limit=0.75,
    attention_sinks=True,
    window=4,
    windowed_layers=(0, 2, 4, 6),
    rope_theta=100.0,
    rotary_scaling=Yarn(4.0, 32, beta_fast=4.0, truncate=False),
)
MODELS: dict[str, Architecture] = {
    "qwen3": QWEN3_LIKE,
    "deepseek": DEEPSEEK_LIKE,
    "deepseek mla": LATENT,
    "deepseek mtp": replace(LATENT, mtp_layers=2),
    "gpt-oss": GPT_OSS_LIKE,
}
