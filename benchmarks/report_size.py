"""Size of a report and the time until it is usable: 5,000 steps of a model with 60 layers.

    python -m benchmarks.report_size [STEPS LAYERS]

Writes a made-up run with every metric of the catalogue into a temporary folder, and opens its
report five times in headless Chromium (/usr/bin/chromium, or $CHROMIUM).
"""

import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

from playwright.sync_api import sync_playwright

from rltrain.tracking.catalogue import METRICS
from rltrain.tracking.report import write_report

CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
OPENED = 5
SAMPLE_EVERY = 10


def write_run(folder: Path, steps: int, layers: int) -> None:
    """Every metric of the catalogue; those per layer every tenth step, rollouts of 512 tokens."""
    noise = random.Random(0)
    fields = {"{layer}": range(layers), "{part}": range(4), "{stat}": range(3)}
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            row: dict[str, float] = {"step": step}
            for metric in METRICS:
                sampled = metric.when != "step" or "{layer}" in metric.name
                if sampled and step % SAMPLE_EVERY != 1:
                    continue
                field = next((name for name in fields if name in metric.name), None)
                for value in fields[field] if field else (0,):
                    name = metric.name.replace(field, str(value)) if field else metric.name
                    row[name] = noise.lognormvariate(0, 1)
            file.write(json.dumps(row) + "\n")
    with (folder / "rollouts.jsonl").open("w") as file:
        for step in range(1, steps + 1, 100):
            for sample in range(4):
                file.write(json.dumps(rollout(step, sample, noise)) + "\n")


def rollout(step: int, sample: int, noise: random.Random, tokens: int = 512) -> dict[str, object]:
    return {
        "step": step,
        "group": 0,
        "sample": sample,
        "prompt": "What is 3 + 4?",
        "response": "word " * tokens,
        "answer": "7",
        "reward": 1.0,
        "reward_parts": {"format": 0.5, "answer": 0.5},
        "advantage": noise.gauss(0, 1),
        "finish_reason": "stop",
        "tokens": ["word "] * tokens,
        "rollout_logprobs": [-noise.random() for _ in range(tokens)],
        "old_logprobs": [-noise.random() for _ in range(tokens)],
        "ratio": [noise.lognormvariate(0, 0.1) for _ in range(tokens)],
        "flipped": [int(noise.random() < 0.2) for _ in range(tokens)],
        "loss_mask": [1] * tokens,
    }


def opened(page_file: Path) -> list[float]:
    """Milliseconds from navigation until the page's script has run, by opening."""
    times = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for _ in range(OPENED):
            page = browser.new_page()
            page.goto(page_file.as_uri())
            page.wait_for_selector("html[data-ready]", state="attached")
            times.append(page.evaluate("performance.getEntriesByName('page-ready')[0].startTime"))
            page.close()
        browser.close()
    return times


def main(arguments: list[str]) -> None:
    steps, layers = (int(text) for text in arguments) if arguments else (5000, 60)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_run(folder, steps, layers)
        start = time.perf_counter()
        page = write_report(folder)
        written = time.perf_counter() - start
        times = opened(page)
        print(f"{steps} steps, {layers} layers: {page.stat().st_size / 1e6:.2f} MB")
        print(f"written in {written:.1f} s")
        shown = ", ".join(f"{one:.0f}" for one in times)
        print(f"usable after {statistics.median(times):.0f} ms (median of {shown})")


if __name__ == "__main__":
    main(sys.argv[1:])
