"""Which routers the backward pass reruns. Replay checks real schedules against it elsewhere."""

import pytest

from rltrain.config.policy import PolicyConfig
from rltrain.policy.passes.recompute import router_reruns

LAYERS = [3, 4, 7]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, []),
        ({"recompute": "selective"}, []),
        ({"recompute": "selective", "recompute_modules": ["layernorm", "moe_act"]}, []),
        ({"recompute": "selective", "recompute_modules": ["core_attn", "moe"]}, LAYERS),
        ({"recompute_modules": ["moe"]}, []),
        ({"recompute": "full"}, LAYERS),
        ({"recompute": "full", "recompute_num_layers": 3}, LAYERS),
        ({"recompute": "full", "recompute_method": "block"}, [3]),
        ({"recompute": "full", "recompute_method": "block", "recompute_num_layers": 2}, [3, 4]),
        ({"recompute": "full", "recompute_method": "block", "recompute_num_layers": 9}, LAYERS),
        ({"recompute_method": "block", "recompute_num_layers": 2}, []),
    ],
)
def test_router_reruns(options: dict[str, object], expected: list[int]) -> None:
    reruns = router_reruns(PolicyConfig.model_validate(options), LAYERS)
    assert reruns == {layer: int(layer in expected) for layer in LAYERS}
