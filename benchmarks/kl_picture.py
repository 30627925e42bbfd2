"""Draws docs/kl-over-bits.svg from kl_over_bits.json: KL over bits a weight, and all that has 4.5 bits side by side.

    python benchmarks/kl_picture.py

The curve of a series goes through the least KL at each number of bits; a hollow mark is a point of it with more. The
picture has its own background, for light and dark screens, since a page need not have the one that the screen asks for.
"""

import json
from collections.abc import Mapping, Sequence
from math import ceil, floor, log10
from pathlib import Path
from typing import Any

from tpuconv.text import html as escape

FACTS = Path(__file__).with_name("kl_over_bits.json")
PICTURE = Path(__file__).parent.parent / "docs" / "kl-over-bits.svg"
Point = Mapping[str, Any]
"""An entry of the facts."""

SERIES = {
    "calibrated": "tpuconv, calibrated",
    "nearest": "tpuconv, without data",
    "llama-matrix": "llama.cpp, importance matrix",
    "llama": "llama.cpp",
    "llm-compressor": "llm-compressor",
}
"""The title of each series, by its key in the facts."""
BITS = 4.5
"""The bits of which all points are listed."""
WIDTH, LEFT, RIGHT, TOP = 800, 64, 24, 70
HEIGHT = 360  # of the curves
ROW, BAR_LEFT = 22, 300
LIGHT = {
    **{"ink": "#1b1f24", "soft": "#57606a", "grid": "#dde2e7", "page": "#ffffff"},
    **{"calibrated": "#0b5fd0", "nearest": "#56a4e8", "llama-matrix": "#c2410c", "llama": "#e8963a"},
    "llm-compressor": "#8b3fc4",
}
DARK = {
    **{"ink": "#e6e9ed", "soft": "#9aa4af", "grid": "#30363d", "page": "#15181c"},
    **{"calibrated": "#4c9aff", "nearest": "#a9d4ff", "llama-matrix": "#ff7b4a", "llama": "#ffc37a"},
    "llm-compressor": "#d2a8ff",
}
"""The colours of light and dark screens."""


def style(colours: Mapping[str, str]) -> str:
    """Returns the rules that have colours; no variables, which few programs but browsers read."""
    ink, soft, grid, page = (colours[name] for name in ("ink", "soft", "grid", "page"))
    rules = f"text{{fill:{ink}}}.soft{{fill:{soft}}}.grid{{stroke:{grid}}}.page{{fill:{page}}}"
    for key in SERIES:
        rules += f".line.{key},.mark.{key}{{stroke:{colours[key]}}}.bar.{key}{{fill:{colours[key]}}}"
        rules += f".mark.{key}{{fill:{colours[key]}}}.hollow.{key}{{fill:{page}}}"
    return rules


STYLE = f"""
text{{font:14px system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}}
.title{{font-size:18px;font-weight:600}}.mark{{stroke-width:2}}
.line{{fill:none;stroke-width:2.5}}
{style(LIGHT)}
@media(prefers-color-scheme:dark){{{style(DARK)}}}
"""


def render(facts: Sequence[Point], model: str) -> str:
    """Returns the picture of the points of a model."""
    listed = sorted((point for point in facts if point["bits"] == BITS), key=lambda point: point["mean_kl"])
    below = TOP + HEIGHT + 100
    height = below + ROW * len(listed) + 24
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img" aria-label="KL by bits a weight">',
        f"<style>{STYLE}</style>",
        f'<rect class="page" width="{WIDTH}" height="{height}" rx="8"/>',
        text(20, 30, "What quantization loses, by bits a weight", "title"),
        text(20, 52, f"{model}: KL from the unquantized model, nats a token, logarithmic; lower is better", "soft"),
        *draw_curves(facts),
        text(20, below - 22, f"At {BITS:g} bits a weight", "title"),
        *draw_bars(listed, below),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def text(x: float, y: float, what: str, kind: str, anchor: str = "start") -> str:
    """Returns a line of text."""
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(what)}</text>'


def draw_curves(facts: Sequence[Point]) -> list[str]:
    """Returns the axes, and the curve and the marks of each series."""
    first, last = floor(min(point["bits"] for point in facts)), ceil(max(point["bits"] for point in facts))
    low, high = (log10(each(point["mean_kl"] for point in facts)) for each in (min, max))
    low, high = floor(low * 2) / 2, ceil(high * 2) / 2

    def x(bits: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (bits - first) / (last - first)

    def y(kl: float) -> float:
        return TOP + HEIGHT * (high - log10(kl)) / (high - low)

    out = []
    for kl in (factor * 10.0**power for power in range(floor(low), ceil(high) + 1) for factor in (1, 3)):
        if low <= log10(kl) <= high:
            out.append(f'<path class="grid" d="M{LEFT} {y(kl):.1f}H{WIDTH - RIGHT}"/>')
            out.append(text(LEFT - 8, y(kl) + 5, f"{kl:g}", "soft", "end"))
    for bits in range(first, last + 1):
        out.append(f'<path class="grid" d="M{x(bits):.1f} {TOP}V{TOP + HEIGHT}"/>')
        out.append(text(x(bits), TOP + HEIGHT + 20, str(bits), "soft", "middle"))
    out.append(text((LEFT + WIDTH - RIGHT) / 2, TOP + HEIGHT + 40, "bits a weight", "soft", "middle"))
    for key in reversed(SERIES):  # the first on top
        points = [point for point in facts if point["series"] == key]
        if not points:
            continue
        curve = least(points)
        if len(curve) > 1:
            path = "L".join(f"{x(point['bits']):.1f} {y(point['mean_kl']):.1f}" for point in curve)
            out.append(f'<path class="line {key}" d="M{path}"/>')
        for point in sorted(points, key=lambda point: point in curve):  # hollow marks below
            kind = "mark" if point in curve else "mark hollow"
            place = f'cx="{x(point["bits"]):.1f}" cy="{y(point["mean_kl"]):.1f}" r="4.5"'
            out.append(f'<circle class="{kind} {key}" {place}><title>{escape(describe(point))}</title></circle>')
    return out + draw_legend([key for key in SERIES if any(point["series"] == key for point in facts)])


def draw_legend(keys: Sequence[str]) -> list[str]:
    """Returns the titles of the series, where curves that fall leave room."""
    left = WIDTH - RIGHT - 262
    out = [f'<rect class="page" x="{left - 12}" y="{TOP + 4}" width="270" height="{20 * len(keys) + 36}"/>']
    for number, key in enumerate(keys):
        middle = TOP + 20 + 20 * number
        out.append(f'<path class="line {key}" d="M{left} {middle}h28"/>')
        out.append(f'<circle class="mark {key}" cx="{left + 14}" cy="{middle}" r="4.5"/>')
        out.append(text(left + 40, middle + 5, SERIES[key], ""))
    return [*out, text(left, middle + 27, "hollow: other ways at equal bits", "soft")]


def draw_bars(points: Sequence[Point], top: float) -> list[str]:
    """Returns a row for each point: its series, its name, and a bar as long as its KL."""
    most = max(point["mean_kl"] for point in points)
    out = []
    for number, point in enumerate(points):
        key, base = point["series"], top + ROW * number + 15
        length = (WIDTH - BAR_LEFT - 70) * point["mean_kl"] / most
        name = text(BAR_LEFT - 10, base, f"{SERIES[key].split(',')[0]}: {point['name']}", "", "end")
        bar = f'<rect class="bar {key}" x="{BAR_LEFT}" y="{base - 11:.1f}" width="{length:.1f}" height="13" rx="2"/>'
        out += [name, bar, text(BAR_LEFT + length + 8, base, f"{point['mean_kl']:.3f}", "soft")]
    return out


def least(points: Sequence[Point]) -> list[Point]:
    """Returns the point with the least KL at each number of bits, to a quarter of a bit, by bits."""
    best: dict[int, Point] = {}
    for point in sorted(points, key=lambda point: point["mean_kl"]):
        best.setdefault(round(4 * point["bits"]), point)
    return [best[quarters] for quarters in sorted(best)]


def describe(point: Point) -> str:
    """Returns what is shown of a point under a pointer."""
    return f"{SERIES[point['series']]}: {point['name']}, {point['bits']:g} bits, KL {point['mean_kl']:.4g}"


def main() -> None:
    facts = json.loads(FACTS.read_text())
    PICTURE.write_text(render(facts["points"], facts["model"]))


if __name__ == "__main__":
    main()
