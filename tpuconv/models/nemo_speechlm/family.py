"""Nemotron 3.5 Transcribe: the text model's config and mapping tables."""

from typing import ClassVar

from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.rows import FURTHER_TOKENS, when
from tpuconv.models.common.wrapper import HEARS, WrapperConfig
from tpuconv.models.nemotron_h import family as nemotron_h
from tpuconv.models.registry import family
from tpuconv.notation.forms import Forms
from tpuconv.notation.table import Map, MappingTable, is_of_mtp, under

NEMO_NAMES = {
    "backbone.embeddings.": "llm.model.embed_tokens.",
    "backbone.norm_f.": "llm.model.norm.",
    "backbone.": "llm.model.",
    "lm_head.": "llm.lm_head.",
    **{f"mixer.{name}": f"mixer._fp32_params.{name}" for name in ("A_log", "D", "dt_bias")},
}
"""Parts of the names of Nemotron-H, and those that releases have for them."""

SPEECH_EXPERTS: tuple[Forms, ...] = tuple(
    {
        "stacked, in last": (
            Map("experts.gate_and_up_projs", "up.kernel", f"E {width} M"),
            Map("experts.down_projs", "down.kernel", f"E M {width}"),
        ),
        "stacked": (
            Map("experts.up_proj", "up.kernel", f"E M {width} -> E {width} M"),
            Map("experts.down_proj", "down.kernel", f"E {width} M -> E M {width}"),
        ),
        "one": nemotron_h.plain_experts(width),
    }
    for width in ("D", "expert_dim")
)
"""The experts of releases, which have no gate, and those that transformers writes."""


@family_config
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


EXPERT_PLACES = {"is_full_width": SPEECH_EXPERTS[0], "has_latent": SPEECH_EXPERTS[1]}

TABLE = MappingTable(
    (
        *(
            row
            for row in nemotron_h.TABLE.renamed(nemo_name)
            if not is_of_mtp(row) and ".experts." not in row.hf_names[0]
        ),
        *(
            row
            for condition, experts in EXPERT_PLACES.items()
            for row in when(
                condition,
                *under("llm.model.layers.{J}.mixer", "layers.{J}.moe", *experts["stacked, in last"]),
            )
        ),
    ),
    ignore={"perception.*": HEARS, "ctc_timestamp.*": HEARS, "llm.mtp.*": FURTHER_TOKENS},
    copies={"llm.lm_head.weight": "llm.model.embed_tokens.weight"},
)

FAMILY = family(
    Config,
    TABLE,
    "Nemotron 3.5 Transcribe, text",
    "Nemotron3_5TranscribeForConditionalGeneration",
    forms=SPEECH_EXPERTS,
)
