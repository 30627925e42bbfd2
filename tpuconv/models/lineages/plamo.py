"""PLaMo 3."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from tpuconv.jsonfile import short
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.gpt import qkv_rows
from tpuconv.models.common.rope import GLOBAL_ROPE, PLAIN_ROPE, Rope
from tpuconv.models.common.rows import HEAD_NORMS
from tpuconv.models.common.windows import ROPES_BY_KIND, PatternConfig, read_older_ropes
from tpuconv.models.declare import decoder
from tpuconv.models.parts import Attn, Mlp, Norms
from tpuconv.notation.table import Map


@family_config
class Plamo3Config(PatternConfig):
    """The last of every `sliding_window_pattern` layers sees all tokens. The others have rotary positions of their own,
    `local_rope`. Some files list the window of each layer."""

    derived: ClassVar[frozenset[str]] = PatternConfig.derived | {"local_rope"}
    aliases: ClassVar[Mapping[str, str]] = {
        "window_size": "sliding_window",
        "rope_local_theta": "rope_local_base_freq",
        "rope_global_theta": "rope_theta",
    }
    left_out: ClassVar[frozenset[str]] = frozenset({"interleaved_sliding_window", "_sliding_window_pattern"})
    rope_fields: ClassVar[Mapping[str, str]] = ROPES_BY_KIND

    rope: Rope = GLOBAL_ROPE
    local_rope: Rope = PLAIN_ROPE
    rope_local_base_freq: float = 1e4
    sliding_window_pattern: int = 8

    @classmethod
    def in_our_keys(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        for windows in filter(None, map(raw.get, WINDOW_LISTS)):
            if isinstance(windows, list):
                raw = {**raw, "sliding_window": next(filter(None, windows), None)}
        return super().in_our_keys(raw)

    @classmethod
    def read_ropes(cls, raw: Mapping[str, Any], context: int) -> dict[str, Any]:
        return read_older_ropes(cls, raw, context)

    def disagreements(self, raw: Mapping[str, Any]) -> Iterator[str]:
        for key in WINDOW_LISTS:
            if isinstance(given := raw.get(key), list) and tuple(given) != self.windows:
                yield f"{key}={short(given)} is not {short(list(self.windows))}, which follows from other keys"

    @property
    def full_every(self) -> int:  # type: ignore[override]
        """The last of as many layers sees all tokens."""
        return self.sliding_window_pattern


WINDOW_LISTS = ("sliding_window", "interleaved_sliding_window")
"""The keys that may list the window of each layer."""

PLAMO3 = decoder(
    "plamo3",
    "PLaMo 3",
    "Plamo3ForCausalLM",
    Norms(
        "sandwich",
        "modules.plamo:OffsetRMSNorm",
        ("pre_mixer_norm", "post_mixer_norm", "pre_mlp_norm", "post_mlp_norm"),
        module="modules.plamo:OffsetBlock",
    ),
    Attn(
        norms="each head",
        rows=(
            *qkv_rows("self_attn.qkv_proj"),
            Map("self_attn.o_proj.weight", "attn.o.kernel", "D (N H) -> N H D"),
            *HEAD_NORMS,
        ),
    ),
    Mlp("fused"),
    config=Plamo3Config,
    names={
        "model.layers.{L}": "model.layers.layers.{L}",
        "model.layers.{L}.self_attn": "model.layers.layers.{L}.mixer",
    },
    only={
        **{"attention_bias": (False,), "scale_embedding": (False,), "hidden_activation": ("swiglu", "silu")},
        **{"linear_type": ("normal",), "image_token_id": (None,), "image_feature_size": (None,)},
        **{"image_proj_type": ("linear", None), "rope_scaling_factor": (1.0,), "initial_context_length": (None,)},
    },
    # As `configuration_plamo.py` of pfnet/plamo-3-nict-2b-base has them.
    defaults={
        **{"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 13312, "num_hidden_layers": 32},
        **{"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 2048},
        **{"rms_norm_eps": 1e-6, "tie_word_embeddings": True, "sliding_window": 2048, "layer_types": None},
    },
)
