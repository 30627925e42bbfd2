"""Nemotron 3.5 Transcribe: the text model's config and mapping tables."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from tpuconv.mapping.table import Map, MappingTable, is_of_mtp, under
from tpuconv.models.common.rows import FURTHER_TOKENS, when
from tpuconv.models.common.wrapper import HEARS, WrapperConfig
from tpuconv.models.nemotron_h import family as nemotron_h
from tpuconv.models.registry import Family

NEMO_NAMES = {
    "backbone.embeddings.": "llm.model.embed_tokens.",
    "backbone.norm_f.": "llm.model.norm.",
    "backbone.": "llm.model.",
    "lm_head.": "llm.lm_head.",
    **{f"mixer.{name}": f"mixer._fp32_params.{name}" for name in ("A_log", "D", "dt_bias")},
}
"""Parts of the names of Nemotron-H, and those that releases have for them."""

SPEECH_EXPERT_ROWS = under(
    "llm.model.layers.{J}.mixer.experts",
    "layers.{J}.moe",
    *when(
        "is_full_width",
        Map("gate_and_up_projs", "up.kernel", "E D M"),
        Map("down_projs", "down.kernel", "E M D"),
    ),
    *when(
        "has_latent",
        Map("gate_and_up_projs", "up.kernel", "E C M"),
        Map("down_projs", "down.kernel", "E M C"),
    ),
)
"""The experts of releases, which have no gate."""


@dataclass(frozen=True)
class Config(WrapperConfig, nemotron_h.Config):
    """The keys of `text_config`. Layers for multi-token prediction are not read."""

    model_type: ClassVar[str] = "nemo_speechlm"
    outside_keys: ClassVar[frozenset[str]] = frozenset({"word_timestamp_config"})

    @property
    def has_mtp(self) -> bool:
        return False


def nemo_name(name: str) -> str:
    """Returns the name that releases have for a tensor of Nemotron-H."""
    for old, new in NEMO_NAMES.items():
        name = name.replace(old, new)
    return name


def speech_table(rows: Sequence[Map], variant: str) -> MappingTable:
    """Returns the table of a text model without what hears, as a variant of this name."""
    outside = {"perception.*": HEARS, "ctc_timestamp.*": HEARS, "llm.mtp.*": FURTHER_TOKENS}
    copies = {"llm.lm_head.weight": "llm.model.embed_tokens.weight"}
    return MappingTable(rows, ignore=outside, copies=copies, variant=variant)


NUMBERED_ROWS = tuple(row for row in nemotron_h.TABLE.renamed(nemo_name) if not is_of_mtp(row))
OTHER_ROWS = tuple(row for row in NUMBERED_ROWS if ".experts." not in row.hf_names[0])

FAMILY = Family(
    name="nemo_speechlm",
    summary="Nemotron 3.5 Transcribe, text",
    config=Config,
    table=speech_table((*OTHER_ROWS, *SPEECH_EXPERT_ROWS), ""),
    variants=(speech_table(NUMBERED_ROWS, "numbered"),),
    model="tpuconv.models.nemo_speechlm.modules:Model",
    architectures={"Nemotron3_5TranscribeForConditionalGeneration": "nemo_speechlm"},
)
