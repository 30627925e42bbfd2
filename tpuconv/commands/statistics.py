"""Rows of tables of statistics, which several commands show, and what the gates say of them."""

from typing import TYPE_CHECKING

from tpuconv.commands.console import styled

if TYPE_CHECKING:
    from rich.text import Text

    from tpuconv.verify.logits import LogitStatistics
    from tpuconv.verify.vectors import VectorStatistics

StatisticRow = tuple[str, str, str]
"""The description of a statistic, its value, and the name of its gate, if it may have one."""


def divergence_rows(result: "LogitStatistics") -> tuple[StatisticRow, ...]:
    """Returns the rows of divergences and of most likely tokens."""
    rounding = [] if result.rounding_kl is None else [f"{result.rounding_kl:.3g}"]
    return (
        ("mean KL divergence (nats)", f"{result.mean_kl:.3g}", "mean_kl"),
        *(("mean KL of another rounding", kl, "") for kl in rounding),
        ("99.9th percentile of KL", f"{result.p999_kl:.3g}", ""),
        ("same most likely token", f"{100 * result.top1:.2f}%", ""),
        (f"the same, of {result.decided} tokens without a tie", f"{100 * result.top1_decided:.2f}%", "top1"),
    )


def relative_row(result: "LogitStatistics") -> StatisticRow:
    """Returns the row of the largest difference of logits, by the largest logit."""
    return "largest difference / largest logit", f"{result.relative_difference:.2g}", "relative_difference"


def verdict(result: "LogitStatistics | VectorStatistics", gate: str) -> "str | Text":
    """Returns a cell that says whether a gate holds; an empty one if it is not set."""
    if gate not in result.gates:
        return ""
    holds = ("failed", "red") if result.fails(gate) else ("holds", "green")
    return styled(holds, f": {result.gates[gate]:.3g}")
