"""The text model of North Micro Vision: config and mapping table."""

from collections.abc import Mapping
from typing import Any, ClassVar

from tpuconv.errors import ConfigError
from tpuconv.models.cohere2.family import TABLE
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.mrope import without_mrope
from tpuconv.models.common.rope import PLAIN_ROPE, Rope, check_rope_keys, rope_of_layers
from tpuconv.models.common.windows import ROPES_BY_KIND, WINDOW_KINDS, PatternConfig
from tpuconv.models.registry import family


@family_config
class Config(PatternConfig):
    """The keys of config.json. Without `layer_types` all layers see all tokens. `rope_parameters` has an object for
    each of the `layer_types`, or null for layers without rotary positions: `rotated` are those with them. `pooling` is
    that of scores."""

    model_type: ClassVar[str] = "cohere_compass_text"
    only: ClassVar = {"pooling": (None, "eos")}
    hf_names: ClassVar[Mapping[str, str]] = {"rms_norm_eps": "layer_norm_eps"}
    derived: ClassVar[frozenset[str]] = PatternConfig.derived | {"local_rope", "rotated"}
    nullable: ClassVar[frozenset[str]] = frozenset({"logit_scale"})
    full_every: ClassVar[int] = 1
    rope_fields: ClassVar[Mapping[str, str]] = ROPES_BY_KIND

    head_dim: int | None = None
    local_rope: Rope = PLAIN_ROPE
    rotated: tuple[str, ...] = WINDOW_KINDS
    attention_bias: bool
    logit_scale: float = 1.0

    @classmethod
    def read_ropes(cls, raw: Mapping[str, Any], context: int) -> dict[str, Any]:
        """As `DecoderConfig.read_ropes`, for each type of layer. What `rope_parameters` has beside these has no
        effect.

        Raises:
            ConfigError: `rope_parameters` does not say it of a type of layer.
        """
        check_rope_keys(raw)
        given = raw.get("rope_parameters") or {kind: {} for kind in WINDOW_KINDS}
        by_kind = {kind: given[kind] for kind in WINDOW_KINDS if kind in given}
        if unsaid := sorted({*(raw.get("layer_types") or WINDOW_KINDS[:1])} - by_kind.keys()):
            raise ConfigError(f"config.json: rope_parameters has nothing for layers of the type {', '.join(unsaid)}")
        ropes = {}
        for kind, field in ROPES_BY_KIND.items():
            own = without_mrope(rope_of_layers({"rope_parameters": by_kind}, kind, PLAIN_ROPE.theta))
            ropes[field] = Rope.from_hf(own, cls.model_type, context)
        return {**ropes, "rotated": tuple(kind for kind, own in by_kind.items() if own is not None)}

    @property
    def ropes(self) -> tuple[Rope | None, ...]:
        return tuple(
            rope if kind in self.rotated else None for kind, rope in zip(self.kinds, super().ropes, strict=True)
        )


FAMILY = family(Config, TABLE, "the text model of North Micro Vision, saved on its own", "CohereCompassForCausalLM")
