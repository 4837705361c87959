"""Numbers to an SVG picture: what each drive read over time, and where a token's time went. Text in, text out; no file, no other library.

The picture draws its own background and follows the viewer's preference for dark or light. Lines differ in dashes and segments in their labels,
so that nothing hangs on colour alone.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

from layout.sizes import format_rate

WIDTH = 900
_LEFT, _RIGHT = 110, 30
_PLOT = WIDTH - _LEFT - _RIGHT
_RATE_HEIGHT = 220
_BAR_HEIGHT, _BAR_STEP = 22, 34
_LEGEND_STEP = 20
_N_COLOURS = 6
_DASHES = ("", "8 4", "2 3", "10 3 2 3", "4 2", "14 4")
# Of Okabe and Ito: told apart with any kind of colour vision. The first is brighter on dark ground.
_LIGHT = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b07d00", "#5b5b5b")
_DARK = ("#56b4e9", "#e8793a", "#2fc79b", "#e29ac4", "#e69f00", "#b0b0b0")
# A glyph of the usual sans-serif fonts at 12 px is about this wide.
_GLYPH = 6.6


class RateSeries(NamedTuple):
    """What one drive read: bytes per second in each interval, as (begin in seconds, end in seconds, rate)."""

    name: str
    intervals: tuple[tuple[float, float, float], ...]


class TimeBar(NamedTuple):
    """Where a token's time went in one run: (what it was spent on, seconds), adding up to the whole."""

    name: str
    parts: tuple[tuple[str, float], ...]


def bench_chart(title: str, *, rates: Sequence[RateSeries], bars: Sequence[TimeBar]) -> str:
    """Return the picture; a part for which there are no numbers says so."""
    parts = [_text(_LEFT, 28, title, "title")]
    top = 60.0
    for piece, height in (_rate_panel(rates, top), _bar_panel(bars, top + _rate_panel_height(rates))):
        parts.append(piece)
        top += height
    return _document(title, top, parts)


def _document(title: str, height: float, parts: Sequence[str]) -> str:
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {_number(height)}" width="{WIDTH}" height="{_number(height)}" role="img">',
            f"<title>{escape(title)}</title>",
            f"<style>{_style()}</style>",
            f'<rect class="ground" width="{WIDTH}" height="{_number(height)}"/>',
            *parts,
            "</svg>\n",
        ]
    )


def _style() -> str:
    def colours(palette: Sequence[str], ground: str, ink: str, grid: str) -> str:
        rules = [f".ground{{fill:{ground}}} .edge{{stroke:{ground}}} text{{fill:{ink}}} text.inside{{fill:{ground}}} .grid{{stroke:{grid}}}"]
        rules += [f".line{n}{{stroke:{colour}}} .area{n}{{fill:{colour}}}" for n, colour in enumerate(palette)]
        return " ".join(rules)

    plain = "text{font:12px sans-serif} .title{font:bold 16px sans-serif} .head{font:bold 13px sans-serif} .line{fill:none;stroke-width:2}"
    dark = colours(_DARK, "#16181c", "#e6e6e6", "#3a3f47")
    return f"{plain} {colours(_LIGHT, '#ffffff', '#1f2328', '#d8dce0')} @media (prefers-color-scheme:dark){{{dark}}}"


def _rate_panel_height(rates: Sequence[RateSeries]) -> float:
    return _RATE_HEIGHT + 70 + _LEGEND_STEP * len(rates) if _has_points(rates) else 60


def _has_points(rates: Sequence[RateSeries]) -> bool:
    return any(series.intervals for series in rates)


def _rate_panel(rates: Sequence[RateSeries], top: float) -> tuple[str, float]:
    """Return the panel of read rates and its height."""
    height = _rate_panel_height(rates)
    heading = _text(_LEFT, top, "read rate of each drive over time", "head")
    if not _has_points(rates):
        return heading + _text(_LEFT, top + 22, "these runs hold no samples of what the drives read"), height
    below = top + 16 + _RATE_HEIGHT
    x_ticks = axis_ticks(max(end for s in rates for _, end, _ in s.intervals), most=10)
    y_ticks = axis_ticks(max(rate for s in rates for _, _, rate in s.intervals), most=5)

    def x_of(seconds: float) -> float:
        return _LEFT + _PLOT * seconds / x_ticks[-1]

    def y_of(rate: float) -> float:
        return below - _RATE_HEIGHT * rate / y_ticks[-1]

    pieces = [heading]
    for tick in y_ticks:
        pieces += [_line(_LEFT, y_of(tick), WIDTH - _RIGHT, y_of(tick)), _text(_LEFT - 8, y_of(tick) + 4, format_rate(tick), anchor="end")]
    for tick in x_ticks:
        pieces += [_line(x_of(tick), below, x_of(tick), below + 5), _text(x_of(tick), below + 20, f"{tick:g} s", anchor="middle")]
    for n, series in enumerate(rates):
        corners = [(x_of(t), y_of(rate)) for begin, end, rate in series.intervals for t in (begin, end)]
        y = below + 42 + _LEGEND_STEP * n
        pieces += [_curve(n, corners), _curve(n, [(_LEFT, y - 4), (_LEFT + 36, y - 4)]), _text(_LEFT + 46, y, series.name)]
    return "\n".join(pieces), height


def _bar_panel(bars: Sequence[TimeBar], top: float) -> tuple[str, float]:
    """Return the panel of stacked bars and its height."""
    heading = _text(_LEFT, top, "where a token's time goes", "head")
    longest = max((sum(seconds for _, seconds in bar.parts) for bar in bars), default=0.0)
    if longest <= 0:
        return heading + _text(_LEFT, top + 22, "no decode step was timed"), 50
    kinds = list(dict.fromkeys(kind for bar in bars for kind, _ in bar.parts))
    scale = axis_ticks(longest * 1000, most=8)
    pieces, y = [heading], top + 16
    for bar in bars:
        pieces.append(_stack(bar, kinds, y, pixels_per_s=_PLOT * 1000 / scale[-1]))
        y += _BAR_STEP
    for tick in scale:
        x = _LEFT + _PLOT * tick / scale[-1]
        pieces += [_line(x, y, x, y + 5), _text(x, y + 20, f"{tick:g} ms", anchor="middle")]
    for n, kind in enumerate(kinds):
        row = y + 44 + _LEGEND_STEP * n
        pieces += [_block(n, _LEFT, row - 11, 14, 14, kind), _text(_LEFT + 22, row, kind)]
    return "\n".join(pieces), y + 44 + _LEGEND_STEP * len(kinds) - top


def _stack(bar: TimeBar, kinds: Sequence[str], y: float, *, pixels_per_s: float) -> str:
    pieces, x = [_text(_LEFT - 8, y + 15, bar.name, anchor="end")], float(_LEFT)
    for kind, seconds in bar.parts:
        width, label = seconds * pixels_per_s, f"{kind}: {seconds * 1000:.3g} ms"
        pieces.append(_block(kinds.index(kind), x, y, width, _BAR_HEIGHT, label))
        value = f"{seconds * 1000:.3g}"
        if width > _GLYPH * (len(value) + 1):
            pieces.append(f'<text x="{_number(x + width / 2)}" y="{_number(y + 15)}" text-anchor="middle" class="inside">{value}</text>')
        x += width
    return "\n".join(pieces)


def axis_ticks(largest: float, *, most: int) -> list[float]:
    """Return rising marks from 0 to the first one at or above `largest`, at steps of 1, 2 or 5 times a power of ten, at most `most` steps."""
    if largest <= 0:
        return [0.0, 1.0]
    power = 10.0 ** math.floor(math.log10(largest / most))
    step = next(power * factor for factor in (1, 2, 5, 10) if largest / (power * factor) <= most)
    # Rounded: three times 0.1 is no mark that anyone wants to read.
    return [round(step * n, 12) for n in range(math.ceil(largest / step - 1e-9) + 1)]


def _text(x: float, y: float, text: str, kind: str = "", *, anchor: str = "start") -> str:
    style = f' class="{kind}"' if kind else ""
    return f'<text x="{_number(x)}" y="{_number(y)}" text-anchor="{anchor}"{style}>{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="grid" x1="{_number(x1)}" y1="{_number(y1)}" x2="{_number(x2)}" y2="{_number(y2)}"/>'


def _curve(number: int, corners: Sequence[tuple[float, float]]) -> str:
    dash = _DASHES[number % len(_DASHES)]
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    points = " ".join(f"{_number(x)},{_number(y)}" for x, y in corners)
    return f'<polyline class="line line{number % _N_COLOURS}"{dashes} points="{points}"/>'


def _block(number: int, x: float, y: float, width: float, height: float, label: str) -> str:
    places = f'x="{_number(x)}" y="{_number(y)}" width="{_number(width)}" height="{_number(height)}"'
    return f'<rect class="edge area{number % _N_COLOURS}" {places}><title>{escape(label)}</title></rect>'


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
