"""LFM3: config and mapping table."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from tpuconv.mapping.table import Map, under
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.rope import PLAIN_ROPE, ROPE_KEYS, Rope
from tpuconv.models.common.rows import ATTENTION, HEAD_NORMS, O_BIAS, QKV_BIAS, when
from tpuconv.models.common.windows import read_two_ropes
from tpuconv.models.lfm2.family import LFM2_MLP, ShortConvConfig, lfm2_table
from tpuconv.models.registry import family

LFM3_ROPE = Rope("proportional", theta=1e6, partial_rotary_factor=0.5)
"""The rotary positions of layers that see all tokens, of a config.json without any."""


@family_config
class Config(ShortConvConfig):
    """The keys of config.json. Layers with a sliding window have rotary positions of their own, `local_rope`. Without
    `layer_types` the third layer of every four sees all tokens, and the first has a window, but for the very first."""

    model_type: ClassVar[str] = "lfm3"
    other_kinds: ClassVar[tuple[str, ...]] = ("full_attention", "sliding_attention")
    derived: ClassVar[frozenset[str]] = ShortConvConfig.derived | {"local_rope"}

    rope: Rope = LFM3_ROPE
    local_rope: Rope = PLAIN_ROPE
    sliding_window: int | None
    attention_bias: bool
    use_sandwich_norm: bool
    use_attention_gate: bool

    @classmethod
    def read_ropes(cls, raw: Mapping[str, Any], context: int) -> dict[str, Any]:
        return read_two_ropes(cls, raw, context) if any(raw.get(key) for key in ROPE_KEYS) else {}

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if "sliding_attention" in self.kinds and self.sliding_window is None:
            yield "layers have 'sliding_attention' with sliding_window=None"

    @property
    def kinds(self) -> tuple[str, ...]:
        if self.layer_types is not None:
            return self.layer_types
        kinds = ("sliding_attention", "conv", "full_attention", "conv")
        return ("conv", *(kinds[i % 4] for i in range(1, self.num_hidden_layers)))

    @property
    def axes(self) -> dict[str, Any]:
        return {**super().axes, "f": tuple(i for i, kind in enumerate(self.kinds) if kind != self.state_kind)}

    @property
    def windows(self) -> tuple[int | None, ...]:
        return tuple(self.sliding_window if kind == "sliding_attention" else None for kind in self.kinds)

    @property
    def ropes(self) -> tuple[Rope | None, ...]:
        of_kind = {"full_attention": self.rope, "sliding_attention": self.local_rope}
        return tuple(of_kind.get(kind) for kind in self.kinds)


TABLE = lfm2_table(
    *under("model.layers.{L}.feed_forward", "layers.{L}.mlp", *LFM2_MLP),
    *when(
        "use_sandwich_norm",
        Map("model.layers.{L}.post_operator_norm.weight", "layers.{L}.post_attn_norm.scale", "D"),
        Map("model.layers.{L}.post_ffn_norm.weight", "layers.{L}.post_mlp_norm.scale", "D"),
    ),
    attention=(
        *ATTENTION,
        *when("attention_bias", *QKV_BIAS, O_BIAS),
        *HEAD_NORMS,
        *when("use_attention_gate", Map("self_attn.gate_proj.weight", "attn.gate.kernel", "N D -> D N")),
    ),
)

FAMILY = family(Config, TABLE, "LFM3", "Lfm3ForCausalLM")
