"""Zamba: config and mapping table."""

from collections.abc import Iterator, Mapping
from typing import ClassVar

from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.hybrid import ChannelConfig
from tpuconv.models.common.rows import MLP, when
from tpuconv.models.registry import family
from tpuconv.models.zamba2.family import SHARED_BLOCK, SharedBlocks
from tpuconv.notation.letters import Word, declare
from tpuconv.notation.table import Map, MappingTable, under

declare(
    mamba_heads=Word("heads of Mamba-1, each with keys, queries and time steps of its own"),
    head_channels=Word("channels of such a head", as_="K"),
)


@family_config
class Config(SharedBlocks, ChannelConfig):
    """The keys of config.json. The state is Mamba-1's, in heads, and there is one shared block, without adapters and
    without rotary positions. Of each `attn_layer_period` layers after the third one has it, at `attn_layer_offset`."""

    model_type: ClassVar[str] = "zamba"
    hf_names: ClassVar[Mapping[str, str]] = {"layer_types": "layers_block_type", "head_dim": "attention_head_dim"}
    only: ClassVar = {**SharedBlocks.only, "hidden_mamba_act": ("silu",)}
    least: ClassVar[Mapping[str, int]] = {"attn_layer_offset": 0}
    derived: ClassVar[frozenset[str]] = ChannelConfig.derived | {"num_mem_blocks", "use_mem_rope"}
    left_out: ClassVar[frozenset[str]] = frozenset(
        {
            *("attention_hidden_size", "use_mamba_kernels", "use_associative_scan", "num_logits_to_keep"),
            *("time_step_min", "time_step_max", "time_step_floor"),
        }
    )

    num_key_value_heads: int | None = None
    head_dim: int | None = None
    layer_types: tuple[str, ...] | None = None
    mamba_dt_rank: int | None = None
    n_mamba_heads: int
    attn_layer_period: int
    attn_layer_offset: int
    num_mem_blocks: int = 1
    use_mem_rope: bool = False

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if (width := self.mamba_expand * self.hidden_size) % self.n_mamba_heads:
            yield (
                f"mamba_expand={self.mamba_expand} times hidden_size={self.hidden_size}, {width}, is not a multiple of "
                f"n_mamba_heads={self.n_mamba_heads}"
            )

    @property
    def kinds(self) -> tuple[str, ...]:
        if self.layer_types is not None:
            return self.layer_types
        first, period, offset = (self.state_kind,) * 2 + ("hybrid",), self.attn_layer_period, self.attn_layer_offset
        later = range(max(0, self.num_hidden_layers - len(first)))
        return first + tuple("hybrid" if layer % period == offset else self.state_kind for layer in later)

    @property
    def sizes(self) -> dict[str, int]:
        sizes = super().sizes
        return {
            **sizes,
            "mamba_heads": self.n_mamba_heads,
            "head_channels": max(1, sizes["channels"] // self.n_mamba_heads),
        }


_PAIRS = "(mamba_heads head_channels (1 + 1))"
"""Each channel beside its gate."""
_MAMBA_IN_HEADS = (
    Map(
        "in_proj.weight",
        ("x.kernel", "z.kernel"),
        f"{_PAIRS} D -> D mamba_heads head_channels, D mamba_heads head_channels",
    ),
    Map("conv1d.weight", "conv.kernel", "(mamba_heads head_channels) 1 taps -> mamba_heads head_channels taps"),
    *when(
        "mamba_conv_bias", Map("conv1d.bias", "conv.bias", "(mamba_heads head_channels) -> mamba_heads head_channels")
    ),
    Map(
        "x_proj_weight",
        ("dt_a.kernel", "b.kernel", "c.kernel"),
        "mamba_heads (step_rank + key_dim + key_dim) head_channels -> mamba_heads head_channels step_rank, "
        "mamba_heads head_channels key_dim, mamba_heads head_channels key_dim",
    ),
    Map("dt_proj_weight", "dt.kernel", "mamba_heads head_channels step_rank -> mamba_heads step_rank head_channels"),
    Map("dt_proj_bias", "dt_bias", "mamba_heads head_channels"),
    Map("A_log", "a_log", "mamba_heads head_channels key_dim -> mamba_heads key_dim head_channels"),
    Map("D", "skip", "mamba_heads head_channels"),
    Map("out_proj.weight", "o.kernel", "D (mamba_heads head_channels) -> mamba_heads head_channels D"),
    *when(
        "mamba_proj_bias",
        Map(
            "in_proj.bias",
            ("x.bias", "z.bias"),
            f"{_PAIRS} -> mamba_heads head_channels, mamba_heads head_channels",
        ),
        Map("out_proj.bias", "o.bias", "D"),
    ),
)
_MIXER_IN_HEADS = (*under("mamba", "mamba", *_MAMBA_IN_HEADS), Map("input_layernorm.weight", "mamba_norm.scale", "D"))
_ONE_BLOCK_ROWS = (*SHARED_BLOCK, *under("feed_forward", "mlp", *MLP))
_ONE_BLOCK = "shared_transf"

TABLE = MappingTable(
    (
        Map("model.embed_tokens.weight", "embed.embedding", "V D"),
        *under("model.layers.{state_layers}", "layers.{state_layers}", *_MIXER_IN_HEADS),
        *under("model.layers.{attention_layers}.mamba_decoder", "layers.{attention_layers}", *_MIXER_IN_HEADS),
        Map("model.layers.{attention_layers}.linear.weight", "layers.{attention_layers}.mix.kernel", "D A -> A D"),
        *under(f"model.layers.{{sharing_layers}}.{_ONE_BLOCK}", "layers.{sharing_layers}", *_ONE_BLOCK_ROWS),
        Map("model.final_layernorm.weight", "norm.scale", "D"),
    ),
    copies={
        "lm_head.weight": "model.embed_tokens.weight",
        **{
            f"model.layers.{{repeating_0}}.{_ONE_BLOCK}.{name}": f"model.layers.{{sharing_0}}.{_ONE_BLOCK}.{name}"
            for row in _ONE_BLOCK_ROWS
            for name in row.hf_names
        },
    },
)

FAMILY = family(Config, TABLE, "Zamba 7B", "ZambaForCausalLM")
