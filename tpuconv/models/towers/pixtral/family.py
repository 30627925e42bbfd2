"""The tower of Pixtral: config and table."""

from dataclasses import dataclass
from typing import Any

from tpuconv.models.common.beside import Tower, TowerConfig
from tpuconv.models.towers.rows import DOWN, IN_HEADS, OUT_OF_HEADS, PATCH_MATRIX, UP, rms_norm, without_bias
from tpuconv.notation.table import Map, under


@dataclass(frozen=True, kw_only=True)
class PixtralConfig(TowerConfig):
    """The keys of `vision_config`."""

    hidden_size: int = 1024
    intermediate_size: int = 4096
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    num_channels: int = 3
    patch_size: int = 16
    hidden_act: str = "gelu"
    rope_theta: float = 10_000.0

    @property
    def sizes(self) -> dict[str, Any]:
        return {
            "D": self.hidden_size,
            "N": self.num_attention_heads,
            "H": self.hidden_size // self.num_attention_heads,
            "F": self.intermediate_size,
            "L": self.num_hidden_layers,
            "X": self.num_channels,
            "p": self.patch_size,
            "q": self.patch_size,
            "C": self.num_channels * self.patch_size**2,
        }


def _rows(q: str, k: str, v: str, o: str, gate: str, down: str, up: str) -> tuple[Map, ...]:
    return (
        *without_bias("patch_conv", "patch", PATCH_MATRIX),
        *rms_norm("ln_pre", "pre_norm"),
        *under(
            "transformer.layers.{L}",
            "layers.{L}",
            *rms_norm("attention_norm", "attn_norm"),
            *rms_norm("ffn_norm", "mlp_norm"),
            *(
                row
                for n, x in zip((q, k, v), "qkv", strict=True)
                for row in without_bias(f"attention.{n}", f"attn.{x}", IN_HEADS)
            ),
            *without_bias(f"attention.{o}", "attn.o", OUT_OF_HEADS),
            *without_bias(f"feed_forward.{gate}", "mlp.gate", UP),
            *without_bias(f"feed_forward.{up}", "mlp.up", UP),
            *without_bias(f"feed_forward.{down}", "mlp.down", DOWN),
        ),
    )


PIXTRAL = Tower(
    "pixtral",
    "Pixtral",
    PixtralConfig,
    _rows("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "down_proj", "up_proj"),
    "tpuconv.models.towers.pixtral.modules:Pixtral",
)

RELEASED_PIXTRAL = Tower(
    "released_pixtral",
    "Mistral Large 4",
    PixtralConfig,
    _rows("wq", "wk", "wv", "wo", "w1", "w2", "w3"),
    "tpuconv.models.towers.pixtral.modules:ReleasedPixtral",
)
"""The same with Mistral's own names; neighbouring dimensions rotate together."""
