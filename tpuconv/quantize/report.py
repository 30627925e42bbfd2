"""The quantization error of each parameter, from statistics that were summed while it was quantized.

The signal-to-noise ratio is 10 log10(sum x^2 / sum (x - x')^2) in dB. x' is the weight that quantized value and scale
stand for.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, log10, prod
from typing import Any

from tpuconv.checkpoint.manifest import element_bytes
from tpuconv.names import OWN_TARGET, collapse
from tpuconv.pages import html_page, html_table
from tpuconv.targets.registry import get_target
from tpuconv.text import format_size
from tpuconv.text import html as escape


@dataclass(frozen=True)
class Row:
    """One quantized parameter.

    Attributes:
        rule: number of its rule in the config.
        bits: per weight, with its share of the scales.
        count: number of weights.
        clipped: share of the weights that are outside of the range.
        source: if the source has it encoded, whether it was "kept" or "requantized"; else empty.
    """

    name: str
    qtype: str
    rule: int
    bits: float
    count: int
    snr_db: float
    clipped: float
    source: str = ""

    def to_json(self) -> dict[str, Any]:
        """Returns the keys that docs/json.md lists; an infinite ratio is null."""
        return vars(self) | {"snr_db": self.snr_db if self.snr_db < inf else None}


@dataclass(frozen=True)
class Report:
    """The report of a checkpoint.

    Attributes:
        rows: the quantized parameters, worst first.
        parameters, weight_bits: number and mean bits of all weights of the model, quantized or not.
        bytes: of the arrays on the disk.
        notes: what was left as it is or, by a calibration, at the nearest values, and why; and what the ratios say.
    """

    config: str
    summary: str
    rows: Sequence[Row]
    parameters: int
    bytes: int
    weight_bits: float
    notes: Sequence[str] = ()

    def to_json(self) -> dict[str, Any]:
        """Returns the keys that docs/json.md lists."""
        return {
            **({"notes": list(self.notes)} if self.notes else {}),
            "config": self.config,
            "parameters": self.parameters,
            "bytes": self.bytes,
            "bits_per_weight": round(self.weight_bits, 4),
            "tensors": [row.to_json() for row in self.rows],
        }


def report(manifest: Mapping[str, Any]) -> Report:
    """Returns the report of a quantized checkpoint, from its manifest."""
    rows = []
    for name, facts in manifest["quantization"]["parameters"].items():
        statistics = facts["figures"]
        noise = statistics["noise"]
        rows.append(
            Row(
                name=name,
                qtype=facts["qtype"],
                rule=facts["rule"],
                bits=facts["bits"],
                count=int(statistics["count"]),
                snr_db=10 * log10(statistics["signal"] / noise) if noise and statistics["signal"] else inf,
                clipped=statistics["clipped"] / statistics["count"],
                source=next((how for how in ("kept", "requantized") if how in facts), ""),
            )
        )
    target = get_target(manifest["options"].get("target", OWN_TARGET))
    parts = {target.part(row.name, suffix) for row in rows for suffix in target.quantized or ()}
    sizes = {n: (prod(a["shape"]), element_bytes(a["dtype"])) for n, a in manifest["arrays"].items()}
    plain = [(count, 8 * size) for name, (count, size) in sizes.items() if name not in parts]
    bits = sum(row.bits * row.count for row in rows) + sum(count * each for count, each in plain)
    parameters = sum(row.count for row in rows) + sum(count for count, _ in plain)
    return Report(
        config=manifest["quantization"]["name"],
        summary=manifest["quantization"]["summary"],
        rows=sorted(rows, key=lambda row: row.snr_db),
        parameters=parameters,
        bytes=manifest.get("stored_bytes", manifest["bytes"]),
        weight_bits=bits / parameters,
        notes=[*manifest["quantization"].get("notes", ()), *_notes(manifest["quantization"]["parameters"])],
    )


OF_OUTPUTS = (
    "calibrated weights: dB measures the errors of weights; a calibration lowers the errors of outputs, which `tpuconv "
    "compare` measures, and may raise the former"
)


def _notes(parameters: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Returns a line for each kind of parameters of which a calibration left something at the nearest values, and what
    the ratios of calibrated ones say."""
    left: dict[str, dict[str, int]] = {}
    for name, facts in parameters.items():
        if (calibration := facts.get("calibration")) and calibration["left"]:
            left.setdefault(calibration["why"], {})[name] = calibration["left"]
    return [
        f"{pattern}: {sum(counts[name] for name in names)} matrices rounded to nearest: {why}"
        for why, counts in left.items()
        for pattern, names in collapse(counts).items()
    ] + [OF_OUTPUTS] * any("calibration" in facts for facts in parameters.values())


@dataclass(frozen=True)
class PatternSummary:
    """The parameters of one pattern of names, and their signal-to-noise ratios."""

    pattern: str
    rows: Sequence[Row]

    @property
    def worst(self) -> Row:
        """The parameter with the lowest ratio."""
        return min(self.rows, key=lambda row: row.snr_db)

    @property
    def mean_db(self) -> float:
        """The mean ratio in dB."""
        return sum(row.snr_db for row in self.rows) / len(self.rows)


def by_pattern(rows: Sequence[Row]) -> list[PatternSummary]:
    """Returns the rows by type and pattern, the one with the worst row first."""
    out = []
    for kind in dict.fromkeys((row.qtype, row.bits, row.source) for row in rows):
        by_name = {row.name: row for row in rows if (row.qtype, row.bits, row.source) == kind}
        collapsed = collapse(sorted(by_name)).items()
        out += [PatternSummary(pattern, [by_name[name] for name in names]) for pattern, names in collapsed]
    return sorted(out, key=lambda kind: kind.worst.snr_db)


# -- as a page --------------------------------------------------------------------------------------------------------

WIDTH, ROW_HEIGHT, LABEL_WIDTH = 960, 18, 330
KIND_NUMBERS = ("bits", "worst dB", "mean dB", "clipped")


def report_page(manifest: Mapping[str, Any]) -> str:
    """Returns the report as an HTML page without other files: totals, a plot of every parameter's ratio, and a table,
    worst first."""
    checkpoint_report = report(manifest)
    groups = by_pattern(checkpoint_report.rows)
    title = f"{manifest['source']['name']}, {checkpoint_report.config}"
    kinds = html_table(
        [("parameters", False), ("count", True), ("type", False), *((title, True) for title in KIND_NUMBERS)],
        (
            [
                *(escape(kind.pattern), f"{len(kind.rows)}", escape(kind.worst.qtype), f"{kind.worst.bits:.2f}"),
                *(f"{kind.worst.snr_db:.1f}", f"{kind.mean_db:.1f}", f"{100 * max(r.clipped for r in kind.rows):.3f}%"),
            ]
            for kind in groups
        ),
    )
    worst = html_table(
        [("parameter", False), ("type", False), *((title, True) for title in ("bits", "weights", "dB"))],
        (
            [escape(row.name), escape(row.qtype), f"{row.bits:.2f}", f"{row.count:,}", f"{row.snr_db:.1f}"]
            for row in checkpoint_report.rows[:20]
        ),
    )
    bits, size = f"{checkpoint_report.weight_bits:.2f} bits a weight", format_size(checkpoint_report.bytes)
    totals = f"{checkpoint_report.parameters:,} parameters, {bits}, {size}"
    return html_page(
        title,
        f"""<p>{escape(checkpoint_report.summary)}. {totals}.
{"".join(f"<p>{escape(note)}." for note in checkpoint_report.notes)}
<h2>Signal-to-noise ratio of every parameter, dB</h2>
{_plot(groups)}
<h2>By kind, worst first</h2>
{kinds}
<h2>The worst parameters</h2>
{worst}""",
    )


def _plot(groups: Sequence[PatternSummary]) -> str:
    """One line per pattern, one dot on it per parameter."""
    values = [row.snr_db for kind in groups for row in kind.rows if row.snr_db < inf]
    if not values:
        return "<p>Nothing was lost."
    low, high = 5 * (min(values) // 5), 5 * (max(values) // 5 + 1)
    height = ROW_HEIGHT * (len(groups) + 2)

    def x(db: float) -> float:
        return LABEL_WIDTH + (WIDTH - LABEL_WIDTH - 20) * (min(db, high) - low) / (high - low)

    grid = "".join(
        f"<line x1={x(db):.1f} x2={x(db):.1f} y1=0 y2={height - ROW_HEIGHT} stroke=currentColor stroke-opacity=.15 />"
        f"<text x={x(db):.1f} y={height - 4} text-anchor=middle>{db:.0f}</text>"
        for db in range(int(low), int(high) + 1, 5)
    )
    dots = "".join(
        f"<text x={LABEL_WIDTH - 8} y={ROW_HEIGHT * (i + 1) + 4} text-anchor=end>{escape(kind.pattern)}</text>"
        + "".join(
            f"<circle class=dot cx={x(row.snr_db):.1f} cy={ROW_HEIGHT * (i + 1)} r=4>"
            f"<title>{escape(row.name)}: {row.snr_db:.1f} dB</title></circle>"
            for row in kind.rows
        )
        for i, kind in enumerate(groups)
    )
    return f'<svg viewBox="0 0 {WIDTH} {height}" role=img aria-label="ratio by parameter">{grid}{dots}</svg>'
