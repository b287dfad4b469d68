"""Line, area and bar charts as SVG, small multiples beside one another, readable on light and dark pages.

An x axis is logarithmic, for load from half to ten times; a y axis is linear from 0, or logarithmic.
"""

from collections.abc import Mapping, Sequence
from math import ceil, floor, log10
from xml.sax.saxutils import escape

import msgspec

WIDTH, HEIGHT = 230, 170
LEFT, TOP, GAP, BOTTOM = 52, 46, 24, 52
# Middle tones: they stand out on white and on black.
COLOURS = ("#2f7fd1", "#d08a1d", "#7a9a3a", "#c0504d")
STYLE = """
text { font: 11px system-ui, sans-serif; fill: #444 }
.title { font-weight: 600; fill: #222 }
.grid { stroke: #8884; stroke-width: 1 }
.axis { stroke: #888; stroke-width: 1; fill: none }
.mark { stroke: #888; stroke-width: 1.2; stroke-dasharray: 4 3 }
@media (prefers-color-scheme: dark) { text { fill: #bbb } .title { fill: #eee } }
"""


class Axis(msgspec.Struct, frozen=True):
    """The values that have a line, from the first to the last; and what they are of."""

    title: str
    ticks: Sequence[float]
    is_logarithmic: bool = False

    def share(self, value: float) -> float:
        """Where a value lies between the ends, 0 to 1; what is beyond them lies at the end."""
        low, high = self.ticks[0], self.ticks[-1]
        value = min(max(value, low), high)
        if self.is_logarithmic:
            return log10(value / low) / log10(high / low)
        return (value - low) / (high - low)


class Panel(msgspec.Struct, frozen=True):
    """One chart: for each series its value at each x; None: there is none."""

    title: str
    x: Sequence[float]
    series: Mapping[str, Sequence[float | None]]


def ticks(most: float) -> tuple[float, ...]:
    """Some four round values from 0 on, the last at or above `most`."""
    most = most if most > 0 else 1.0
    power = 10.0 ** floor(log10(most / 4))
    step = next(power * each for each in (1, 2, 2.5, 5, 10) if power * each * 4 >= most * 0.999)
    return tuple(round(step * number, 9) for number in range(ceil(most / step * 0.999) + 1))


def draw_over_time(title: str, x_title: str, panels: Sequence[Panel]) -> str:
    """Panels over the same time, each with an axis and a legend of its own."""
    step = LEFT + WIDTH + GAP
    height = TOP + HEIGHT + BOTTOM
    parts = [_head(title, len(panels) * step, height)]
    for number, panel in enumerate(panels):
        values = [value for each in panel.series.values() for value in each if value is not None]
        x, y = Axis(x_title, ticks(max(panel.x, default=1.0))), Axis("", ticks(max(values, default=1.0)))
        parts.append(_legend(list(panel.series), (number + 1) * step, top=TOP - 18))
        parts.append(f'<g transform="translate({LEFT + number * step} {TOP})">')
        parts += [*_frame(panel.title, x, y, with_labels=True), *_lines(panel, x, y, with_dots=False), "</g>"]
    return "\n".join([*parts, "</svg>"]) + "\n"


def draw(title: str, panels: Sequence[Panel], x: Axis, y: Axis, *, stacked: bool = False, mark: float = 0.0) -> str:
    """The whole picture. `stacked`: areas on top of one another; `mark`: a dashed line at this height."""
    width = LEFT + len(panels) * (WIDTH + GAP)
    height = TOP + HEIGHT + BOTTOM
    parts = [_head(title, width, height), _legend(list(panels[0].series), width)]
    for number, panel in enumerate(panels):
        parts.append(f'<g transform="translate({LEFT + number * (WIDTH + GAP)} {TOP})">')
        parts += _frame(panel.title, x, y, with_labels=number == 0)
        parts += _areas(panel, x, y) if stacked else _lines(panel, x, y)
        if mark:
            parts.append(f'<path class="mark" d="M0 {_y(y, mark)}H{WIDTH}"/>')
        parts.append("</g>")
    return "\n".join([*parts, "</svg>"]) + "\n"


def draw_bars(title: str, bars: Sequence[tuple[str, float, str]], *, label_width: int = 300) -> str:
    """Horizontal bars: what it is of, how much, and what is written behind it. The longest has the whole width."""
    width, height = label_width + 420, 34 + 26 * len(bars)
    longest = max((value for _, value, _ in bars), default=0.0) or 1.0
    parts = [_head(title, width, height, left=4)]
    for number, (name, value, text) in enumerate(bars):
        top, length = 30 + 26 * number, round(300 * value / longest, 1)
        parts.append(
            f'<text x="{label_width - 8}" y="{top + 13}" text-anchor="end">{escape(name)}</text>'
            f'<rect x="{label_width}" y="{top}" width="{length}" height="18" rx="2" fill="{COLOURS[0]}"/>'
            f'<text x="{label_width + length + 6}" y="{top + 13}">{escape(text)}</text>'
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


def _head(title: str, width: int, height: int, left: int = LEFT) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{escape(title)}"><style>{STYLE}</style>\n'
        f'<text class="title" x="{left}" y="16">{escape(title)}</text>'
    )


def _legend(names: list[str], width: int, top: int = 8) -> str:
    parts = []
    for number, name in enumerate(names):
        left = width - GAP - 90 * (len(names) - number)
        parts.append(
            f'<rect x="{left}" y="{top}" width="10" height="10" rx="2" fill="{COLOURS[number]}"/>'
            f'<text x="{left + 15}" y="{top + 9}">{escape(name)}</text>'
        )
    return "".join(parts)


def _frame(title: str, x: Axis, y: Axis, *, with_labels: bool) -> list[str]:
    parts = [f'<text class="title" x="0" y="-8">{escape(title)}</text>']
    for value in y.ticks:
        parts.append(f'<path class="grid" d="M0 {_y(y, value)}H{WIDTH}"/>')
        if with_labels:
            parts.append(f'<text x="-6" y="{_y(y, value) + 4}" text-anchor="end">{value:,g}</text>')
    parts += [f'<text x="{_x(x, value)}" y="{HEIGHT + 16}" text-anchor="middle">{value:g}</text>' for value in x.ticks]
    parts.append(f'<path class="axis" d="M0 0V{HEIGHT}H{WIDTH}"/>')
    parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT + 36}" text-anchor="middle">{escape(x.title)}</text>')
    if with_labels:
        parts.append(
            f'<text transform="translate(-40 {HEIGHT / 2}) rotate(-90)" text-anchor="middle">{escape(y.title)}</text>'
        )
    return parts


def _lines(panel: Panel, x: Axis, y: Axis, *, with_dots: bool = True) -> list[str]:
    parts = []
    for (name, values), colour in zip(panel.series.items(), COLOURS, strict=False):
        points = [(_x(x, at), _y(y, value)) for at, value in zip(panel.x, values, strict=True) if value is not None]
        path = "M" + "L".join(f"{left} {top}" for left, top in points) if points else ""
        dots = "".join(f'<circle cx="{left}" cy="{top}" r="2.4"/>' for left, top in points if with_dots)
        parts.append(
            f'<g fill="{colour}"><title>{escape(name)}</title>{dots}'
            f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.8"/></g>'
        )
    return parts


def _areas(panel: Panel, x: Axis, y: Axis) -> list[str]:
    parts = []
    below = [0.0] * len(panel.x)
    for (name, values), colour in zip(panel.series.items(), COLOURS, strict=False):
        above = [low + (value or 0.0) for low, value in zip(below, values, strict=True)]
        up = [f"{_x(x, at)} {_y(y, value)}" for at, value in zip(panel.x, above, strict=True)]
        down = [f"{_x(x, at)} {_y(y, value)}" for at, value in zip(panel.x, below, strict=True)]
        outline = "M" + "L".join([*up, *reversed(down)]) + "Z"
        parts.append(f'<path d="{outline}" fill="{colour}" fill-opacity="0.75"><title>{escape(name)}</title></path>')
        below = above
    return parts


def _x(axis: Axis, value: float) -> float:
    return round(axis.share(value) * WIDTH, 1)


def _y(axis: Axis, value: float) -> float:
    return round((1 - axis.share(value)) * HEIGHT, 1)
