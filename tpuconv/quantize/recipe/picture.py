"""Draws the choice of a recipe as a page: the Pareto front of bits and KL, with named points."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor, log10

from tpuconv.pages import html_page
from tpuconv.quantize.recipe.search import Option, SearchSpace, Sums
from tpuconv.text import html as escape

FRONT_WIDTH, FRONT_HEIGHT, LEFT, BOTTOM = 960, 440, 90, 60
LABEL_HEIGHTS = (-8, 20, -24, 36, -40, 52)
"""The heights at which the name of a point may stand, from the point; the first that is free is taken."""
LETTER_WIDTH, LINE_HEIGHT = 7, 15
MOST_POINTS = 200
"""The most points of the front that are drawn."""


@dataclass(frozen=True)
class Point:
    """A choice in the picture: bits per weight, and KL in nats per token."""

    name: str
    bits: float
    kl: float
    is_chosen: bool = False


def uniform_points(space: SearchSpace) -> list[Point]:
    """Returns a point for each option: every group that has it, with it; others with the one nearest in bits."""
    names = list(dict.fromkeys(str(option) for group in space.groups for option in group.options if option.qtype))
    out = []
    for name in names:
        sizes = [o.bits / group.count for group in space.groups for o in group.options if str(o) == name]
        options = [_nearest(group.options, name, sum(sizes) / len(sizes), group.count) for group in space.groups]
        out.append(Point(f"all in {name}", space.bits(options), sum(option.kl for option in options)))
    return out


def _nearest(options: Sequence[Option], name: str, bits: float, count: int) -> Option:
    return min(options, key=lambda o: (str(o) != name, abs(o.bits / count - bits)))


def front_page(title: str, space: SearchSpace, sums: Sums, points: Sequence[Point]) -> str:
    """Returns the page, without other files.

    Args:
        title: its heading.
        space: the groups.
        sums: the front.
        points: what is named in it.
    """
    return html_page(
        title,
        f"""<p>KL divergence from the unquantized model in nats a token, by bits a weight, scales and unquantized
parameters included. The line is the lowest sum of the groups' divergences at each size; points are measured where they
say so.
{_svg(space, sums, points)}""",
    )


def _svg(space: SearchSpace, sums: Sums, points: Sequence[Point]) -> str:
    step = max(1, len(sums.bits) // MOST_POINTS)
    front = [
        (float(bits) / space.parameters, float(kl))
        for bits, kl in zip(sums.bits[::step], sums.kl[::step], strict=True)
        if kl > 0
    ]
    every = [*front, *((point.bits, point.kl) for point in points if point.kl > 0)]
    if not every:
        return "<p>Nothing was lost."
    (least_bits, most_bits), (least_kl, most_kl) = (
        (min(pair[i] for pair in every), max(pair[i] for pair in every)) for i in (0, 1)
    )
    low, high = floor(log10(least_kl)), floor(log10(most_kl)) + 1
    width, height = FRONT_WIDTH - LEFT - 20, FRONT_HEIGHT - BOTTOM - 20

    def x(bits: float) -> float:
        return LEFT + width * (bits - least_bits) / max(most_bits - least_bits, 1e-9)

    def y(kl: float) -> float:
        return 20 + height * (high - log10(max(kl, 10.0**low))) / (high - low)

    grid = "".join(
        f"<line x1={LEFT} x2={FRONT_WIDTH - 20} y1={y(10.0**n):.1f} y2={y(10.0**n):.1f} stroke=currentColor "
        f"stroke-opacity=.15 /><text x={LEFT - 8} y={y(10.0**n) + 4:.1f} text-anchor=end>1e{n}</text>"
        for n in range(low, high + 1)
    ) + "".join(
        f"<text x={x(bits):.1f} y={FRONT_HEIGHT - 32} text-anchor=middle>{bits}</text>"
        for bits in range(int(least_bits) + 1, int(most_bits) + 1)
    )
    grid += (
        f"<text x={LEFT + width / 2} y={FRONT_HEIGHT - 8} text-anchor=middle>bits a weight</text>"
        f'<text transform="translate(14 {20 + height / 2}) rotate(-90)" text-anchor=middle>KL, nats a token</text>'
    )
    line = " ".join(f"{x(bits):.1f},{y(kl):.1f}" for bits, kl in front)
    named = [(p, min(x(p.bits), FRONT_WIDTH - 200), y(p.kl)) for p in points]
    heights = label_heights([(left, up, len(p.name)) for p, left, up in named])
    dots = "".join(
        f"<circle class={'chosen' if p.is_chosen else 'point'} cx={x(p.bits):.1f} cy={up:.1f} r=5><title>"
        f"{escape(p.name)}: {p.bits:.2f} bits, KL {p.kl:.3g}</title></circle>"
        f"<text x={left + 8:.1f} y={height:.1f}>{escape(p.name)}</text>"
        for (p, left, up), height in zip(named, heights, strict=True)
    )
    return (
        f'<svg viewBox="0 0 {FRONT_WIDTH} {FRONT_HEIGHT}" role=img aria-label="KL by bits a weight">{grid}'
        f'<polyline class=front points="{line}" />{dots}</svg>'
    )


def label_heights(labels: Sequence[tuple[float, float, int]]) -> list[float]:
    """Returns the height of each label, so that no two of them overlap where there is room.

    Args:
        labels: of each the x and y of its point, and the number of its letters.
    """
    placed: list[tuple[float, float, float]] = []
    for left, up, letters in labels:
        right = left + LETTER_WIDTH * letters
        free = (
            up + by
            for by in LABEL_HEIGHTS
            if all(right < x or left > end or abs(up + by - y) >= LINE_HEIGHT for x, end, y in placed)
        )
        placed.append((left, right, next(free, up + LABEL_HEIGHTS[0])))
    return [y for _, _, y in placed]
