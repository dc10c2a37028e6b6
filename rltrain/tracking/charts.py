"""Charts as inline SVG text: no script, no fonts, no links; colours come from CSS classes.

Pure functions of numbers. Sizes are in the units of the viewBox; the page scales the picture.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

WIDTH, HEIGHT = 520.0, 230.0
WIDE = 2 * WIDTH
LEFT, RIGHT, TOP, BOTTOM = 52.0, 14.0, 10.0, 26.0
MAX_BARS = 120
MAX_MARKERS = 80


@dataclass(frozen=True)
class Line:
    """One line; ``style`` is a CSS class that sets its colour, ``marked`` draws its points."""

    label: str
    xs: Sequence[float]
    ys: Sequence[float]
    style: str
    marked: bool = False


@dataclass(frozen=True)
class ChartAxis:
    """Maps values to a span of pixels, linearly or by their logarithm."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, at = (
            (math.log10(v) for v in (self.low, self.high, value))
            if self.log
            else (self.low, self.high, value)
        )
        return self.start + (at - low) / (high - low) * (self.end - self.start)


def linear_ticks(low: float, high: float, about: int = 4) -> list[float]:
    """Round numbers, evenly spaced, from at or below ``low`` to at or above ``high``."""
    if high - low <= 1e-9 * max(abs(low), abs(high)):  # no room for round numbers between them
        pad = abs(low) / 2 or 0.5
        low, high = low - pad, high + pad
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    spacing = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * (1 - 1e-9))
    first, last = math.floor(low / spacing + 1e-9), math.ceil(high / spacing - 1e-9)
    return [i * spacing for i in range(first, max(last, first + 1) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten around ``low`` and ``high``, both above 0; every n-th where there are many."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    last = max(last, first + 1)
    every = math.ceil((last - first) / 6)
    return [10.0**i for i in range(first, last + every, every)]


def line_chart(
    lines: Sequence[Line],
    write: Callable[[float], str],
    *,
    log_scale: bool = False,
    bounds: tuple[float, float] | None = None,
    over: str = "step",
) -> Markup:
    """Lines over steps, or what ``over`` names. ``bounds`` fixes the vertical axis; on a log scale
    zeros are left out."""
    points = [
        [(x, y) for x, y in zip(line.xs, line.ys, strict=True) if y > 0 or not log_scale]
        for line in lines
    ]
    xs = [x for line in points for x, _ in line]
    ys = [y for line in points for _, y in line]
    if not xs:
        return Markup("")
    low, high = bounds or (min(ys), max(ys))
    ticks = log_ticks(low, high) if log_scale else linear_ticks(low, high)
    horizontal = ChartAxis(
        min(xs), max(xs) if max(xs) > min(xs) else min(xs) + 1, LEFT, WIDTH - RIGHT
    )
    vertical = ChartAxis(ticks[0], ticks[-1], HEIGHT - BOTTOM, TOP, log_scale)
    drawn = [
        _line(line, kept, horizontal, vertical, write, over)
        for line, kept in zip(lines, points, strict=True)
    ]
    frame = [*_grid(ticks, vertical, write), *_x_labels(min(xs), max(xs), horizontal, over)]
    return _svg([*frame, *drawn], ", ".join(line.label for line in lines))


def stacked_bars(xs: Sequence[int], parts: Mapping[str, Sequence[float]]) -> Markup:
    """A bar a step, its parts stacked in the given order; a long run shows means of some steps."""
    if not xs:
        return Markup("")
    size = math.ceil(len(xs) / MAX_BARS)
    bins = [range(i, min(i + size, len(xs))) for i in range(0, len(xs), size)]
    heights = {
        name: [sum(values[i] for i in one) / len(one) for one in bins]
        for name, values in parts.items()
    }
    ticks = linear_ticks(0.0, max(map(sum, zip(*heights.values(), strict=True))) or 1.0)
    vertical = ChartAxis(0.0, ticks[-1], HEIGHT - BOTTOM, TOP)
    slot = (WIDE - LEFT - RIGHT) / len(bins)
    gap = min(slot * 0.25, 2.0)
    drawn = _grid(ticks, vertical, lambda value: f"{value:g} s", WIDE)
    for index, one in enumerate(bins):
        base = 0.0
        for name, values in heights.items():
            top = base + values[index]
            drawn.append(
                f'<rect class="phase-{escape(name)}" x="{LEFT + index * slot + gap / 2:.2f}" '
                f'y="{vertical(top):.2f}" width="{slot - gap:.2f}" '
                f'height="{vertical(base) - vertical(top):.2f}">'
                f"<title>step {xs[one[0]]}: {escape(name)} {values[index]:.2f} s</title></rect>"
            )
            base = top
    shown = math.ceil(len(bins) / 12)
    for index in range(0, len(bins), shown):
        x = LEFT + (index + 0.5) * slot
        drawn.append(_label(x, HEIGHT - 8, str(xs[bins[index][0]]), "middle"))
    drawn.append(_axis_name(HEIGHT - 8))
    return _svg(drawn, "seconds by phase", width=WIDE)


def heatmap(
    row_labels: Sequence[str], steps: Sequence[int], values: Sequence[Sequence[float | None]]
) -> Markup:
    """Fractions as shades, one row a layer and one column a step; None leaves a cell empty."""
    known = [value for row in values for value in row if value is not None]
    if not known:
        return Markup("")
    low = min(math.floor(min(known) * 20) / 20, 0.95)
    cell = min(26.0, max(10.0, 520.0 / len(row_labels)))
    slot = (WIDE - LEFT - RIGHT) / max(len(steps), 8)
    drawn = []
    for i, (label, row) in enumerate(zip(row_labels, values, strict=True)):
        y = TOP + i * cell
        drawn.append(_label(LEFT - 8, y + cell / 2 + 4, label, "end"))
        for j, value in enumerate(row):
            if value is not None:
                drawn.append(_cell(LEFT + j * slot, y, slot, cell, value, low, label, steps[j]))
    bottom = TOP + len(row_labels) * cell + 18
    shown = max(1, math.ceil(44 / slot))
    for j in range(0, len(steps), shown):
        drawn.append(_label(LEFT + (j + 0.5) * slot, bottom, str(steps[j]), "middle"))
    drawn.append(_axis_name(bottom))
    return _svg(drawn, "overlap by layer and step", width=WIDE, height=bottom + 8)


def _cell(
    x: float, y: float, width: float, height: float, value: float, low: float, label: str, step: int
) -> str:
    strength = 0.08 + 0.92 * (value - low) / (1 - low)
    rect = (
        f'<rect class="cell" x="{x + 1:.2f}" y="{y + 1:.2f}" width="{width - 2:.2f}" '
        f'height="{height - 2:.2f}" rx="3" fill-opacity="{strength:.3f}">'
        f"<title>{escape(label)}, step {step}: {value:.4f}</title></rect>"
    )
    if width < 40 or height < 16:
        return rect
    ink = "ink-strong" if strength > 0.55 else "ink"
    return rect + _label(x + width / 2, y + height / 2 + 4, f"{value:.3f}", "middle", ink)


def _line(
    line: Line,
    points: Sequence[tuple[float, float]],
    horizontal: ChartAxis,
    vertical: ChartAxis,
    write: Callable[[float], str],
    over: str,
) -> str:
    placed = [(horizontal(x), vertical(y), x, y) for x, y in points]
    path = " ".join(f"{px:.1f},{py:.1f}" for px, py, _, _ in placed)
    drawn = [f'<polyline class="line {escape(line.style)}" points="{path}"/>']
    # A point that is not shown still answers the pointer with its value.
    shown = "dot" if line.marked and len(placed) <= MAX_MARKERS else "dot hidden"
    drawn += [
        f'<circle class="{shown} {escape(line.style)}" cx="{px:.1f}" cy="{py:.1f}" r="3.2">'
        f"<title>{escape(line.label)}, {escape(over)} {x:g}: {escape(write(y))}</title></circle>"
        for px, py, x, y in placed
    ]
    return "".join(drawn)


def _grid(
    ticks: Sequence[float], vertical: ChartAxis, write: Callable[[float], str], width: float = WIDTH
) -> list[str]:
    drawn = []
    for tick in ticks:
        y = vertical(tick)
        drawn.append(
            f'<line class="grid" x1="{LEFT}" x2="{width - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        drawn.append(_label(LEFT - 8, y + 4, write(tick), "end"))
    return drawn


def _x_labels(first: float, last: float, horizontal: ChartAxis, over: str) -> list[str]:
    ticks = [t for t in linear_ticks(first, last, 6) if first <= t <= last and t == int(t)]
    labels = [_label(horizontal(t), HEIGHT - 8, f"{t:g}", "middle") for t in ticks]
    return [*labels, _axis_name(HEIGHT - 8, over)]


def _axis_name(y: float, name: str = "step") -> str:
    """Of the horizontal one, under the labels of the vertical one."""
    return _label(LEFT - 14, y, name, "end")


def _label(x: float, y: float, text: str, anchor: str, style: str = "tick") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text class="{style}" {place}>{escape(text)}</text>'


def _svg(
    content: Sequence[str], title: str, width: float = WIDTH, height: float = HEIGHT
) -> Markup:
    body = "".join(content)
    # Every text that went into the content was escaped where it was placed.
    box = f'viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(title)}"'
    return Markup(f"<svg {box}>{body}</svg>")
