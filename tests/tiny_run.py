"""Overrides with which a whole run of the tiny model is as small as it can be."""

SIZES = (
    "cluster.device=cpu",
    "model.tiny.num_layers=2",
    "model.tiny.hidden_size=64",
    "model.tiny.expert_size=64",
)
WARM_START = (
    "model.tiny.warm_start.steps=5",
    "model.tiny.warm_start.batch_size=32",
    "model.tiny.warm_start.num_problems=200",
)
