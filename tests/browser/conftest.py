"""Pages about made-up runs in headless Chromium; skipped where there is no Chromium."""

import json
import math
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from rltrain.tracking.report import write_report

STEPS = 60
ATTACK = "</script><img src=x onerror=document.title='owned'><b>bold</b>"


def chromium() -> str | None:
    if os.environ.get("CHROMIUM"):
        return os.environ["CHROMIUM"]
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    return next(filter(None, map(shutil.which, names)), None)


# Not for the session: Playwright runs an event loop in this thread until it is stopped, and
# asyncio.run in a test of another folder would fail.
@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api")
    path = chromium()
    if path is None:
        pytest.skip("no Chromium on this machine")
    with playwright.sync_playwright() as running:
        started = running.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield started
        started.close()


def write_run(folder: Path, seed: int = 0, **config: Any) -> Path:
    """Files of a run of 60 steps with four layers, rollouts, a spike at step 33 and an attack."""
    folder.mkdir(parents=True, exist_ok=True)
    noise = random.Random(seed)
    rows = [_row(step, noise) for step in range(STEPS + 1)]
    rows[33]["mismatch/k3"] = 0.02
    rows[-1][ATTACK] = 1.0
    _write_lines(folder / "metrics.jsonl", rows)
    sample = {"prompt": "2+2=", "response": ATTACK, "answer": "4", "reward": 1.0}
    _write_lines(folder / "samples.jsonl", [{"step": 60, **sample, "finish_reason": "stop"}])
    _write_lines(
        folder / "rollouts.jsonl", [_rollout(step, i) for step in (1, 60) for i in range(2)]
    )
    values = {"routing_replay": {"mode": "r3"}, "trainer": {"steps": STEPS, "seed": seed}}
    command = "# rltrain train +recipe=grpo_moe_r3"
    (folder / "config.yaml").write_text(f"{command}\n{yaml.safe_dump({**values, **config})}")
    (folder / "outcome.json").write_text(json.dumps({"state": "finished", "error": None}))
    (folder / "versions.json").write_text(json.dumps({"resumed_after_steps": "20"}))
    return folder


def _row(step: int, noise: random.Random) -> dict[str, Any]:
    row = {
        "step": step,
        "reward/mean": 0.5 + 0.005 * step + noise.gauss(0, 0.02),
        "reward/part/format": 0.9,
        "policy/entropy": 1.0 - step / 100,
        "policy/grad_norm": None if step == 5 else 0.4 + noise.random() / 10,
        "mismatch/k3": 3e-5 * math.exp(noise.gauss(0, 0.25)),
        "time/generate": 2.0,
        "time/update": 1.0,
        "time/step": 3.0,
        "throughput/tokens_per_second": 1000.0 + step,
    }
    if step % 10 == 0:
        row |= {"eval/accuracy": 0.5 + step / 200, "eval/num_scored": 512.0}
        row |= {"mismatch_native/k3": 4e-4, "mismatch/num_tokens": 900.0}
        row |= {f"routing/overlap/layer_{layer}": 1 - 0.01 * layer for layer in range(4)}
    return row


def _rollout(step: int, sample: int) -> dict[str, Any]:
    return {
        "step": step,
        "group": 0,
        "sample": sample,
        "prompt": f"problem of step {step}",
        "response": f"four {ATTACK}",
        "answer": "4",
        "reward": float(sample),
        "reward_parts": {"format": 0.25},
        "advantage": sample - 0.5,
        "finish_reason": "stop",
        "tokens": ["four ", "<b>4</b>", ATTACK],
        "rollout_logprobs": [-0.5, -1.0, -0.1],
        "old_logprobs": [-0.5, -1.75, -0.1],
        "ratio": [1.0, 0.4724, 1.0],
        "flipped": [0, 0, 1],
        "loss_mask": [1, 1, 0],
    }


def _write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="session")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(write_run(tmp_path_factory.mktemp("run")))


@pytest.fixture
def opened(browser: Any) -> Iterator[Any]:
    """Opens a file in a new context; a message in the console or an error fails the test."""
    contexts, errors = [], []

    def open_page(path: Path, width: int = 1280, height: int = 900, **options: Any) -> Any:
        context = browser.new_context(viewport={"width": width, "height": height}, **options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: errors.append(message.text))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on(
            "request",
            lambda request: (
                errors.append(request.url) if request.url[:5] not in ("file:", "data:") else None
            ),
        )
        page.goto(path.as_uri())
        page.wait_for_selector("html[data-ready]", state="attached")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert errors == []
