"""Routes through Ray's real object store, at every width, to ranks that own some of the layers."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import ray
import torch
from ray._private import state

from rltrain.policy.passes import fetch_routes as fetching
from rltrain.policy.passes.fetch_routes import fetch_routes
from rltrain.rollout import route_store
from rltrain.rollout.launch import RouteCapture
from rltrain.rollout.route_store import store_here, store_routes
from rltrain.routing.codec import decode
from rltrain.routing.integrity import RouteShape, check_routes

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def store() -> Iterator[Any]:
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    yield store_here()
    ray.shutdown()


@pytest.mark.parametrize("num_experts", [255, 256, 257, 512])
@pytest.mark.parametrize("layers", [(1, 4), (5,), (7, 2)])
def test_what_was_captured_is_what_is_fetched(
    store: Any, num_experts: int, layers: tuple[int, ...]
) -> None:
    shape = RouteShape(8, (1, 2, 4, 5, 7), num_experts, experts_per_token=3)
    rng = np.random.default_rng(num_experts)
    captured = [rng.random((n, 8, num_experts)).argsort(-1)[..., :3] for n in (4, 9, 2)]
    captured[0][0, :, 0], captured[0][0, :, 1:] = num_experts - 1, (0, 1)
    routes = [captured[0], captured[1][:6], captured[2]]
    tokens = [range(len(array) + 1) for array in captured]
    capture = RouteCapture(shape, store, (1, 3, 1), "live")
    checked = check_routes(routes, tokens, shape, ["a", "b", "c"], "vLLM", capture.fallback)
    refs = asyncio.run(store_routes(checked, capture, weight_version=2, producer="vLLM"))
    assert [ref.missing for ref in refs] == [(), ((6, 9),), ()]
    whole = decode(torch.from_numpy(fetch_routes([(ref,) for ref in refs], layers))).numpy()
    assert whole.shape == (5 + 10 + 3, len(layers), 3)
    for found, ids, there in zip(np.split(whole, [5, 15]), captured, (4, 6, 2), strict=True):
        experts = found[:-1]
        assert len(experts) == len(ids) and not found[-1].any()
        assert np.array_equal(experts[:there], ids[:there, list(layers)])
        assert all(len(set(row)) == 3 for row in experts.reshape(-1, 3).tolist())


def captured(store: Any) -> Any:
    shape = RouteShape(1, (0,), 4, experts_per_token=2)
    capture = RouteCapture(shape, store, (1,), "error")
    ids = np.array([[[0, 1]], [[2, 3]]])
    routes = check_routes([ids], [range(3)], shape, ["a"], "vLLM", capture.fallback)
    return store_routes(routes, capture, weight_version=0, producer="vLLM")


def test_objects_that_do_not_come_are_an_error_in_time(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (ref,) = asyncio.run(captured(store))
    never = ray.remote(num_cpus=0)(lambda: time.sleep(60)).remote()
    monkeypatch.setattr(fetching, "LIMIT_S", 0.5)
    with pytest.raises(RuntimeError, match=r"within 0.5 s, and not all have come from .*RL5008"):
        fetch_routes([(replace(ref, blocks=(never,)),)], (0,))
    ray.cancel(never, force=True)


def test_a_store_that_does_not_answer_is_an_error_in_time(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (pid,) = {actor["Pid"] for actor in state.actors(actor_state_name="ALIVE").values()}
    monkeypatch.setattr(route_store, "PUT_S", 0.5)
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(RuntimeError, match=r"did not take the routes within 0.5 s.*RL5008"):
            asyncio.run(captured(store))
    finally:
        os.kill(pid, signal.SIGCONT)
