"""Cohere: Command R and the models after it."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from tpuconv.errors import ConfigError, UnsupportedConfig
from tpuconv.jsonfile import short
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.mrope import Mrope, mrope_sections, without_mrope
from tpuconv.models.common.rope import PLAIN_ROPE, Rope, check_rope_keys, rope_of_layers
from tpuconv.models.common.rows import BIASED_ATTENTION, when
from tpuconv.models.common.windows import (
    ROPES_BY_KIND,
    ROPES_OF_WINDOWS,
    WINDOW_KINDS,
    PatternConfig,
    refuse_flat_ropes,
)
from tpuconv.models.declare import decoder
from tpuconv.models.parts import Attn, Factors, Mlp, Norms
from tpuconv.notation.table import Map

COHERE_EPS = {"rms_norm_eps": "layer_norm_eps"}
"""The key of the epsilon."""
COHERE_ATTENTION = "modules.cohere:CohereAttention"


@family_config
class Cohere2Config(PatternConfig):
    """Without `layer_types` every `sliding_window_pattern`-th layer sees all tokens. Only
    layers with the window have rotary positions."""

    rope_fields: ClassVar[Mapping[str, str]] = ROPES_OF_WINDOWS

    sliding_window_pattern: int = 4

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        width, heads = self.hidden_size, self.num_attention_heads
        if width % heads or self.head_dim not in (None, width // heads):
            yield f"head_dim={self.head_dim} is not hidden_size={width} divided by num_attention_heads={heads}"

    @property
    def full_every(self) -> int:  # type: ignore[override]
        """The last of as many layers sees all tokens."""
        return self.sliding_window_pattern


COHERE2 = decoder(
    "cohere2",
    "Command R7B, Command A",
    "Cohere2ForCausalLM",
    Norms("parallel", "layer without bias"),
    Attn("attention_bias", module=COHERE_ATTENTION),
    Mlp(),
    Factors(logits="logit_scale"),
    config=Cohere2Config,
    hf_names=COHERE_EPS,
    only={
        "use_parallel_block": (True,),
        "use_gated_activation": (True,),
        "use_qk_norm": (False,),
        "rotary_pct": (1.0,),
    },
)

COHERE = decoder(
    "cohere",
    "Command R, Command R+, Aya 23",
    "CohereForCausalLM",
    Norms("parallel", "layer without bias"),
    Attn(
        "attention_bias",
        norms="all heads",
        normed="use_qk_norm",
        norm_kind="layer of heads",
        module=COHERE_ATTENTION,
        rows=(
            *BIASED_ATTENTION,
            *when(
                "use_qk_norm",
                Map("self_attn.q_norm.weight", "attn.q_norm.scale", "N H"),
                Map("self_attn.k_norm.weight", "attn.k_norm.scale", "K H"),
            ),
        ),
    ),
    Mlp(),
    Factors(logits="logit_scale"),
    hf_names=COHERE_EPS,
)


@family_config
class CompassConfig(PatternConfig):
    """Without `layer_types` all layers see all tokens. `rope_parameters` has an object for
    each of the `layer_types`, or null for layers without rotary positions: `rotated` are those with them. `pooling` is
    about scores."""

    derived: ClassVar[frozenset[str]] = PatternConfig.derived | {"local_rope", "rotated"}
    full_every: ClassVar[int] = 1
    rope_fields: ClassVar[Mapping[str, str]] = ROPES_BY_KIND

    local_rope: Rope = PLAIN_ROPE
    rotated: tuple[str, ...] = WINDOW_KINDS

    @classmethod
    def read_ropes(cls, raw: Mapping[str, Any], context: int) -> dict[str, Any]:
        """As `DecoderConfig.read_ropes`, for each type of layer. What `rope_parameters` has beside these has no
        effect.

        Raises:
            ConfigError: `rope_parameters` does not say it of a type of layer.
        """
        check_rope_keys(raw)
        refuse_flat_ropes(cls, raw)
        given = raw.get("rope_parameters") or {kind: {} for kind in WINDOW_KINDS}
        by_kind = {kind: given[kind] for kind in WINDOW_KINDS if kind in given}
        if unsaid := sorted({*(raw.get("layer_types") or WINDOW_KINDS[:1])} - by_kind.keys()):
            raise ConfigError(f"config.json: rope_parameters has nothing for layers of the type {', '.join(unsaid)}")
        ropes: dict[str, Any] = {}
        found = {
            mrope_sections({"rope_parameters": own}) or (24, 20, 20) for own in by_kind.values() if own is not None
        }
        if len(found) > 1:
            raise UnsupportedConfig(f"mrope_section differs between types of layers: {short(sorted(found))}")
        for kind, field in ROPES_BY_KIND.items():
            own = without_mrope(rope_of_layers({"rope_parameters": by_kind}, kind, PLAIN_ROPE.theta))
            ropes[field] = Rope.from_hf(own, cls.model_type, context)
        rotated = tuple(kind for kind, own in by_kind.items() if own is not None)
        return {**ropes, "rotated": rotated, "mrope": Mrope(next(iter(found)), interleaved=True) if found else None}

    @property
    def ropes(self) -> tuple[Rope | None, ...]:
        return tuple(
            rope if kind in self.rotated else None for kind, rope in zip(self.kinds, super().ropes, strict=True)
        )


COHERE_COMPASS_TEXT = COHERE2.but(
    "cohere_compass_text",
    "the text model of North Micro Vision, saved on its own",
    "CohereCompassForCausalLM",
    Attn("attention_bias"),
    config=CompassConfig,
    defaults={"logit_scale": 1.0},
    hf_names=COHERE_EPS,
    nullable=frozenset({"logit_scale"}),
    only={"pooling": (None, "eos")},
)
