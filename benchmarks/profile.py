"""What a GPU did in one call, by torch's profiler."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile


@dataclass(frozen=True)
class Profiled:
    gpu_seconds: float
    """In which some kernel or copy ran."""
    kernels: int


def profiled(run: Callable[[], None], tables: Path | None = None) -> Profiled:
    """Run once under the profiler, which slows the CPU down and no kernel.

    Args:
        tables: where to write which kernels took longest, and which operations on the CPU
    """
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        run()
        torch.cuda.synchronize()
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in found.events()
        if event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False)
    )
    if tables is not None:
        tables.parent.mkdir(parents=True, exist_ok=True)
        averages = found.key_averages()
        parts = [
            averages.table(sort_by=key, row_limit=45, max_name_column_width=90)
            for key in ("self_device_time_total", "self_cpu_time_total")
        ]
        tables.write_text("\n\n".join(parts))
    busy, reached = 0.0, float("-inf")
    for start, end in spans:
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return Profiled(busy / 1e6, len(spans))
