"""Forms of rows that releases of all families may have in place of each other."""

from tpuconv.models.common.rows import EXPERT_MLPS, IN_FIRST_EXPERTS, NUMBERED_EXPERT_MLPS, STACKED_EXPERTS
from tpuconv.notation.forms import Forms
from tpuconv.notation.table import Map

GATE_AND_UP = ("gate.kernel", "up.kernel")

EXPERT_FORMS: Forms = {
    "one": EXPERT_MLPS,
    "w1, w2, w3": NUMBERED_EXPERT_MLPS,
    "stacked": STACKED_EXPERTS,
    "one, gate and up": (
        Map("experts.{E}.gate_up_proj.weight", GATE_AND_UP, "(M + M) D -> E D M, E D M"),
        Map("experts.{E}.down_proj.weight", "down.kernel", "D M -> E M D"),
    ),
    "stacked, apart": (
        Map("experts.gate_proj", "gate.kernel", "E M D -> E D M"),
        Map("experts.up_proj", "up.kernel", "E M D -> E D M"),
        Map("experts.down_proj", "down.kernel", "E D M -> E M D"),
    ),
}
"""The experts of a layer, each by itself or all in one tensor."""

IN_FIRST_FORMS: Forms = {"stacked, in first": IN_FIRST_EXPERTS, "one": EXPERT_MLPS}
"""The same of families that stack matrices [in, out]. If the sizes are equal, only the family tells them from
[out, in]: no place has both."""

ALL_FORMS = (EXPERT_FORMS, IN_FIRST_FORMS)
