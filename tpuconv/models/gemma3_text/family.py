"""Gemma 3, the text model on its own: config and mapping table."""

from collections.abc import Mapping
from typing import Any, ClassVar

from tpuconv.mapping.table import under
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.rope import PLAIN_ROPE, Rope
from tpuconv.models.common.rows import HEAD_NORMS, MLP, decoder_table
from tpuconv.models.common.windows import ROPES_BY_KIND, read_older_ropes
from tpuconv.models.gemma.family import BIASED_ATTENTION
from tpuconv.models.gemma2 import family as gemma2
from tpuconv.models.registry import family

GLOBAL_ROPE = Rope(theta=1e6)
"""The rotary positions of layers that see all tokens, of a config.json without any."""


@family_config
class Config(gemma2.Config):
    """The keys of config.json. Layers with a sliding window have rotary positions of their own, `local_rope`, which
    older files describe by `rope_local_base_freq`."""

    model_type: ClassVar[str] = "gemma3_text"
    derived: ClassVar[frozenset[str]] = gemma2.Config.derived | {"local_rope"}
    left_out: ClassVar[frozenset[str]] = frozenset({"_sliding_window_pattern"})  # written beside `layer_types`
    rope_fields: ClassVar[Mapping[str, str]] = ROPES_BY_KIND
    only: ClassVar = {**gemma2.Config.only, "attn_logit_softcapping": (None,)}

    rope: Rope = GLOBAL_ROPE
    local_rope: Rope = PLAIN_ROPE
    rope_local_base_freq: float = 1e4
    sliding_window_pattern: int = 6
    attn_logit_softcapping: None

    @classmethod
    def read_ropes(cls, raw: Mapping[str, Any], context: int) -> dict[str, Any]:
        return read_older_ropes(cls, raw, context)

    @property
    def full_every(self) -> int:  # type: ignore[override]
        """The last of as many layers sees all tokens."""
        return self.sliding_window_pattern


TABLE = decoder_table(*gemma2.NORMS, *BIASED_ATTENTION, *HEAD_NORMS, *under("mlp", "mlp", *MLP))

FAMILY = family(Config, TABLE, "Gemma 3, the text model on its own", "Gemma3ForCausalLM")
