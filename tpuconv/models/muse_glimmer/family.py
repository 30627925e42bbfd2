"""Muse Glimmer: the text model's config and mapping table."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from tpuconv.errors import UnsupportedConfig
from tpuconv.jsonfile import short
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.rope import Rope
from tpuconv.models.common.rows import BIASED_ATTENTION, MLP, SANDWICH_NORMS, decoder_table
from tpuconv.models.common.windows import PatternConfig
from tpuconv.models.common.wrapper import BRINGS, SEES, WrapperConfig, inside
from tpuconv.models.registry import family
from tpuconv.models.towers.moonvit.family import MUSE_VISION
from tpuconv.notation.table import Map, under

FULL_EVERY = 4
"""Without `layer_types` and `layer_rope_theta`, the last layer and every fourth before it sees all tokens, and has no
rotary positions."""


@family_config
class Config(WrapperConfig, PatternConfig):
    """The keys of `text_config`. A layer whose entry of `layer_rope_theta` is 0 has no rotary positions; those of the
    others are `rope_parameters`."""

    model_type: ClassVar[str] = "muse_glimmer"
    only: ClassVar = {"hidden_activation": ("silu",)}

    post_norm_eps: float
    attention_bias: bool
    layer_rope_theta: tuple[float, ...] | None
    qk_scale_factor: float
    output_multiplier: float
    final_logit_softcapping: float

    @classmethod
    def read_ropes(cls, raw: Mapping[str, Any], context: int) -> dict[str, Any]:
        """As `DecoderConfig.read_ropes`. transformers ignores a base of a layer's own."""
        out = super().read_ropes(raw, context)
        theta = out["rope"].theta
        if others := set(raw.get("layer_rope_theta") or ()) - {0, theta}:
            raise UnsupportedConfig(
                f"layer_rope_theta with {short(min(others))} is not implemented for {cls.model_type}, only with 0 and "
                f"with rope_theta={theta}"
            )
        return out

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.post_norm_eps < 0:
            yield f"post_norm_eps={self.post_norm_eps} is negative"
        if self.final_logit_softcapping <= 0:
            yield f"final_logit_softcapping={self.final_logit_softcapping} is not positive"
        if len(self.with_rope) != self.num_hidden_layers:
            yield f"layer_rope_theta has {len(self.with_rope)} entries for num_hidden_layers={self.num_hidden_layers}"

    @property
    def kinds(self) -> tuple[str, ...]:
        if self.layer_types is not None:
            return self.layer_types
        return tuple("full_attention" if is_full else "sliding_attention" for is_full in self._full_by_default)

    @property
    def with_rope(self) -> tuple[bool, ...]:
        """For each layer, True if it has rotary positions."""
        if self.layer_rope_theta is not None:
            return tuple(map(bool, self.layer_rope_theta))
        return tuple(not is_full for is_full in self._full_by_default)

    @property
    def _full_by_default(self) -> tuple[bool, ...]:
        return tuple(after % FULL_EVERY == 0 for after in reversed(range(self.num_hidden_layers)))

    @property
    def ropes(self) -> tuple[Rope | None, ...]:
        return tuple(self.rope if has_rope else None for has_rope in self.with_rope)


TABLE = inside(
    decoder_table(
        *SANDWICH_NORMS,
        *BIASED_ATTENTION,
        Map("self_attn.gate_proj.weight", "attn.gate.kernel", "(N H) D -> D N H"),
        *under("mlp", "mlp", *MLP),
    ),
    "model.language_model.",
    {"vision_tower": SEES, **dict.fromkeys(("vision_adapter", "vision_projection", "perception_emb_norm"), BRINGS)},
)

FAMILY = family(Config, TABLE, "Muse Glimmer", "MuseGlimmerForConditionalGeneration", modalities=(MUSE_VISION,))
