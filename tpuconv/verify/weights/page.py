"""The page about a checkpoint: its tensors by pattern, with statistics and histograms; of two also how they differ."""

from collections.abc import Iterable, Mapping, Sequence
from math import inf

from tpuconv.names import collapse, layer_module
from tpuconv.pages import html_page, html_table
from tpuconv.text import format_count, format_size
from tpuconv.text import html as escape
from tpuconv.verify.weights.measuring import MeasuredTree, MeasuredTrees, MeasuredWeight, WeightComparison
from tpuconv.verify.weights.statistics import TensorDifference, WeightStatistics, merged_statistics

MOST_TENSORS_LISTED = 256
"""The most tensors of a pattern that are listed, so that a page of experts stays small enough for a browser."""

SMALL_CHART, LARGE_CHART = (160, 24), (640, 120)
"""Width and height of a histogram beside a name, and of one of its own."""
LABEL_HEIGHT = 16

STATISTICS_COLUMNS = ("minimum", "maximum", "mean", "deviation", "zeros", "non-finite")


def weights_page(found: MeasuredTrees) -> str:
    """Returns the page of a checkpoint, or of two side by side."""
    trees = found.trees
    title = " and ".join(tree.place for tree in trees)
    body = [_totals(trees)]
    if found.comparison is not None:
        body.append(_differences(trees, found.comparison))
    for tree in trees:
        name = f": {escape(tree.place)}" if len(trees) > 1 else ""
        body += [f"<h2>Modules{name}</h2>", _modules(tree), f"<h2>Tensors{name}</h2>", _notes(tree), _tensors(tree)]
    return html_page(title, "\n".join(body))


def _totals(trees: Sequence[MeasuredTree]) -> str:
    rows = []
    for tree in trees:
        nonfinite = sum(each.values.nonfinite for each in tree.weights)
        values = sum(each.values.count for each in tree.weights if each.weight.parameter)
        dtypes: dict[str, int] = {}
        for each in tree.weights:
            dtypes[each.weight.dtype] = dtypes.get(each.weight.dtype, 0) + each.weight.nbytes
        named = ", ".join(f"{dtype} {format_size(n)}" for dtype, n in sorted(dtypes.items(), key=lambda item: -item[1]))
        counts = f"{len(tree.weights):,}", f"{values:,}", format_size(tree.nbytes)
        rows.append([escape(tree.place), *counts, escape(named), _bad(nonfinite)])
    columns = [("checkpoint", False), ("tensors", True), ("values", True), ("bytes", True), ("dtypes", False)]
    return html_table([*columns, ("non-finite", True)], rows)


def _bad(count: int) -> str:
    return f"<span class=bad>{count:,}</span>" if count else "0"


def _notes(tree: MeasuredTree) -> str:
    histogram = (
        "<p class=facts>A bar counts the values between two powers of two: negative ones to the left, positive ones to "
        "the right, small ones in the middle. Zeros have no bar."
    )
    return histogram + "".join(f"<p>{escape(note)}." for note in tree.notes)


def _modules(tree: MeasuredTree) -> str:
    """The bytes of each module, all layers together, the largest first."""
    sizes: dict[str, list[int]] = {}
    for each in tree.weights:
        sums = sizes.setdefault(layer_module(each.weight.name), [0, 0, 0])
        sums[0] += 1
        sums[1] += each.values.count if each.weight.parameter else 0
        sums[2] += each.weight.nbytes
    groups = [
        (pattern, [sum(column) for column in zip(*(sizes[name] for name in names), strict=True)])
        for pattern, names in collapse(sizes).items()
    ]
    groups.sort(key=lambda group: -group[1][2])
    total = max(1, tree.nbytes)
    rows = (
        [escape(pattern), f"{count:,}", f"{values:,}", format_size(nbytes), f"{100 * nbytes / total:.1f}%", _bar(share)]
        for pattern, (count, values, nbytes) in groups
        for share in [nbytes / total]
    )
    columns = [("module", False), ("tensors", True), ("values", True), ("bytes", True), ("share", True), ("", False)]
    return html_table(columns, rows)


def _bar(share: float) -> str:
    return f'<svg viewBox="0 0 100 10" aria-hidden=true><rect class=bars width={100 * share:.1f} height=10 /></svg>'


# -- tensors ----------------------------------------------------------------------------------------------------------


def _tensors(tree: MeasuredTree) -> str:
    by_name = {each.weight.name: each for each in tree.weights}
    return "\n".join(
        _pattern(pattern, [by_name[name] for name in names]) for pattern, names in collapse(by_name).items()
    )


def _pattern(pattern: str, members: Sequence[MeasuredWeight]) -> str:
    """The tensors of a pattern, closed: its sums in one line. Open: a histogram and the tensors."""
    first = members[0].weight
    kinds = {(each.weight.dtype, each.weight.stored_shape) for each in members}
    others = f" and {len(kinds) - 1} other kinds" if len(kinds) > 1 else ""
    values = merged_statistics(each.values for each in members)
    numbers = [each.numbers for each in members if each.numbers is not None]
    what = f"{format_count(len(members), 'tensor')}, {_shape(first.stored_shape)} {first.dtype}{others}"
    size = format_size(sum(each.weight.nbytes for each in members))
    stored = f"<br>stored: {_sentence(merged_statistics(numbers))}; decoded: " if numbers else "<br>"
    charts = "".join(
        f"<p>{title}</p>{_chart([each], LARGE_CHART)}"
        for title, each in (("stored numbers", merged_statistics(numbers)), ("values", values))
        if each.bins
    )
    return (
        f"<details><summary>{_chart([values], SMALL_CHART)}<b>{escape(pattern)}</b> "
        f"<span class=facts>{escape(what)}, {size}{stored}{_sentence(values)}</span></summary>\n"
        f"{charts}{_listed(members, has_numbers=bool(numbers))}</details>"
    )


def _listed(members: Sequence[MeasuredWeight], *, has_numbers: bool) -> str:
    """The table of the tensors of a pattern; of too many, those with the largest values."""
    shown, note = list(members), ""
    if len(members) > MOST_TENSORS_LISTED:
        chosen = sorted(members, key=lambda each: (-each.values.nonfinite, -each.values.largest))[:MOST_TENSORS_LISTED]
        kept = {each.weight.name for each in chosen}
        shown = [each for each in members if each.weight.name in kept]
        note = f"<p>The {len(shown):,} of {len(members):,} with the largest absolute values."
    columns = [("tensor", False), ("shape", False), ("dtype", False), ("bytes", True)]
    columns += [("stored numbers", True)] * has_numbers + [(name, True) for name in STATISTICS_COLUMNS] + [("", False)]
    rows = (
        [
            *map(escape, (each.weight.name, _shape(each.weight.stored_shape), each.weight.dtype)),
            format_size(each.weight.nbytes),
            *([_span(each.numbers)] if has_numbers else []),
            *_cells(each.values),
            _chart([each.values], SMALL_CHART),
        ]
        for each in shown
    )
    return note + html_table(columns, rows)


def _shape(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape)) or "scalar"


def _span(statistics: WeightStatistics | None) -> str:
    if statistics is None or not statistics.finite:
        return ""
    return f"{statistics.minimum:g} to {statistics.maximum:g}"


def _cells(statistics: WeightStatistics) -> list[str]:
    """The cells of `STATISTICS_COLUMNS`."""
    if not statistics.finite:
        return ["", "", "", "", "", _bad(statistics.nonfinite)]
    numbers = statistics.minimum, statistics.maximum, statistics.mean, statistics.deviation
    share = f"{100 * statistics.zeros / statistics.count:.3g}%"
    return [*(f"{number:.4g}" for number in numbers), share, _bad(statistics.nonfinite)]


def _sentence(statistics: WeightStatistics) -> str:
    """The statistics in one line."""
    bad = f", <span class=bad>{statistics.nonfinite:,} non-finite</span>" if statistics.nonfinite else ""
    if not statistics.finite:
        return f"no finite values{bad}"
    minimum, maximum, mean, deviation, zeros, _ = _cells(statistics)
    return f"{minimum} to {maximum}, mean {mean}, deviation {deviation}, {zeros} zeros{bad}"


# -- histograms -------------------------------------------------------------------------------------------------------


def _chart(sides: Sequence[WeightStatistics], size: tuple[int, int]) -> str:
    """A histogram; of two, the second is an outline over the first. Heights are shares of all values."""
    exponents = [exponent for side in sides for exponent in side.bins]
    if not exponents:
        return ""
    low, high = min(exponents), max(exponents)
    places = [(-1, exponent) for exponent in range(high, low - 1, -1)]
    places += [(1, exponent) for exponent in range(low, high + 1)]
    shares = [
        [side.bins.get(e, (0, 0))[0 if sign < 0 else 1] / max(1, side.count) for sign, e in places] for side in sides
    ]
    top = max(max(side) for side in shares) or 1.0
    (width, height), is_large = size, size == LARGE_CHART
    step = width / len(places)
    body = _bars(shares[0], top, step, height, places if is_large else None)
    body += "".join(f'<path class=other d="{_outline(side, top, step, height)}"/>' for side in shares[1:])
    labels = _labels(places, step, height) if is_large else ""
    full = height + (LABEL_HEIGHT if is_large else 0)
    ratio = "" if is_large else " preserveAspectRatio=none"
    return f'<svg viewBox="0 0 {width} {full}"{ratio} role=img aria-label="histogram">{body}{labels}</svg>'


def _bars(
    shares: Sequence[float], top: float, step: float, height: int, places: Sequence[tuple[int, int]] | None
) -> str:
    """The bars as one path; with `places` each by itself, with a title."""
    heights = [height * share / top for share in shares]
    if places is None:
        parts = (f"M{i * step:.1f} {height}v-{h:.1f}h{step:.1f}v{h:.1f}" for i, h in enumerate(heights) if h >= 0.05)
        return f'<path class=bars d="{"".join(parts)}"/>'
    return "".join(
        f"<rect class=bars x={i * step:.1f} y={height - h:.1f} width={max(step - 1, 0.5):.1f} height={h:.1f}>"
        f"<title>{_range(*place)}: {100 * share:.3g}%</title></rect>"
        for i, (h, share, place) in enumerate(zip(heights, shares, places, strict=True))
        if share
    )


def _range(sign: int, exponent: int) -> str:
    """The values of a bin in words."""
    low, high = f"2^{exponent}", f"2^{exponent + 1}"
    return f"{low} to {high}" if sign > 0 else f"-{high} to -{low}"


def _outline(shares: Sequence[float], top: float, step: float, height: int) -> str:
    lines = (f"V{height - height * share / top:.1f}H{(i + 1) * step:.1f}" for i, share in enumerate(shares))
    return f"M0 {height}{''.join(lines)}V{height}"


def _labels(places: Sequence[tuple[int, int]], step: float, height: int) -> str:
    """The powers of two below a chart, as many as have room."""
    every = max(1, int(48 / step) + 1)
    half = len(places) // 2
    return "".join(
        f"<text x={i * step + step / 2:.1f} y={height + LABEL_HEIGHT - 3} text-anchor=middle>"
        f"{'-' if sign < 0 else ''}2^{exponent}</text>"
        for i, (sign, exponent) in enumerate(places)
        if (i - half if sign > 0 else half - 1 - i) % every == every // 2
    )


# -- two checkpoints --------------------------------------------------------------------------------------------------


def _differences(trees: Sequence[MeasuredTree], comparison: WeightComparison) -> str:
    """The parameters of both by pattern, the largest relative difference first, and those that one has."""
    sides = [{each.weight.parameter: each for each in tree.weights if each.weight.parameter} for tree in trees]
    by_name = {each.name: each for each in comparison.differences}
    equal = sum(not each.largest for each in comparison.differences)
    # Patterns of names in their order, each list the worst first.
    order = {each.name: i for i, each in enumerate(comparison.differences)}
    patterns = [
        (pattern, [by_name[name] for name in sorted(names, key=order.__getitem__)])
        for pattern, names in collapse(name for name in sides[0] if name in by_name).items()
    ]
    patterns.sort(key=lambda item: order[item[1][0].name])
    shown = "\n".join(_differing(pattern, members, sides) for pattern, members in patterns)
    return (
        f"<h2>Differences</h2><p>{len(by_name):,} parameters are in both, {equal:,} of them equal. A relative "
        "difference is the largest absolute difference of a parameter, divided by the largest absolute value of the "
        f"first checkpoint. In histograms the first is filled, the second an outline.\n{shown}\n"
        + _only(f"Only in {trees[0].place}", comparison.only_reference)
        + _only(f"Only in {trees[1].place}", comparison.only_other)
        + _only("In different shapes", comparison.reshaped)
    )


def _differing(pattern: str, members: Sequence[TensorDifference], sides: Sequence[Mapping[str, MeasuredWeight]]) -> str:
    worst = members[0]
    both = [[side[each.name] for each in members] for side in sides]
    weights = [side[0].weight for side in both]
    what = " and ".join(dict.fromkeys(f"{_shape(weight.shape)} {weight.dtype}" for weight in weights))
    sizes = " and ".join(format_size(sum(each.weight.nbytes for each in side)) for side in both)
    facts = f"{format_count(len(members), 'parameter')}, {what}, {sizes}"
    chart = [merged_statistics(each.values for each in side) for side in both]
    said = f"relative {_number(worst.relative)}, largest {_number(worst.largest)}, SNR {_number(worst.snr_db)} dB"
    if not worst.largest:
        said = "equal"
    elif len(members) > 1:
        said = f"{said}, of {worst.name}"
    note = f"<p>The {MOST_TENSORS_LISTED} that differ most." if len(members) > MOST_TENSORS_LISTED else ""
    columns = [("parameter", False), ("relative", True), ("largest", True), ("SNR dB", True), ("dtypes", False)]
    columns += [("deviations", True), ("", False)]
    rows = (
        [
            escape(each.name),
            *map(_number, (each.relative, each.largest, each.snr_db)),
            escape(" / ".join(side[each.name].weight.dtype for side in sides)),
            " / ".join(f"{side[each.name].values.deviation:.4g}" for side in sides),
            _chart([side[each.name].values for side in sides], SMALL_CHART),
        ]
        for each in members[:MOST_TENSORS_LISTED]
    )
    return (
        f"<details><summary>{_chart(chart, SMALL_CHART)}<b>{escape(pattern)}</b> "
        f"<span class=facts>{escape(facts)}<br>{escape(said)}</span></summary>\n"
        f"{_chart(chart, LARGE_CHART)}{note}{html_table(columns, rows)}</details>"
    )


def _number(value: float) -> str:
    return "∞" if value == inf else "-∞" if value == -inf else f"{value:.3g}"


def _only(title: str, names: Iterable[str]) -> str:
    patterns = collapse(names)
    if not patterns:
        return ""
    rows = ([escape(pattern), f"{len(members):,}"] for pattern, members in patterns.items())
    return f"<h2>{escape(title)}</h2>{html_table([('parameters', False), ('count', True)], rows)}"
