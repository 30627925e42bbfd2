"""Zamba 2: config and mapping table."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from tpuconv.jsonfile import short
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.hybrid import NO_LIMIT, MambaConfig, StateConfig
from tpuconv.models.common.rope import Rope
from tpuconv.models.common.rows import (
    FUSED_MLP,
    JOINED_ATTENTION,
    MAMBA,
    MAMBA_CONV_BIAS,
    MAMBA_IN_BIAS,
    MAMBA_NORM,
    MAMBA_OUT_BIAS,
    when,
)
from tpuconv.models.registry import family
from tpuconv.notation.letters import Word, declare
from tpuconv.notation.table import Map, MappingTable, under

MOST_SHARED = 4
"""The most shared blocks. The releases have one or two."""

declare(
    sharing_layers=Word("layers that run a shared block, in their first run of it"),
    adapter_rank=Word("rank of the adapters of shared blocks"),
    **{
        f"{name}_{block}": Word(f"{meaning} shared block {block}")
        for block in range(MOST_SHARED)
        for name, meaning in {
            "sharing": "first layer that runs",
            "repeating": "layers that run again",
            "uses": "numbers, among the layers with attention, of those that run",
        }.items()
    },
)

KINDS_OF_RELEASE = tuple(
    kind
    for count, then in [(6, 1), *[(5, 1)] * 6, (4, 1), (3, 1), (2, 0)]
    for kind in ("linear_attention",) * count + ("hybrid",) * then
)
"""The default of `layers_block_type`, which is no key of its own in transformers."""


@dataclass(frozen=True, kw_only=True)
class SharedBlocks(StateConfig):
    """A decoder whose layers `hybrid` run one of `num_mem_blocks` shared blocks in turn before their state, the others
    have a state alone. Without tied embeddings transformers does not share the blocks either. A family's Config derives
    from this class and from a `StateConfig`, in this order."""

    other_kinds: ClassVar[tuple[str, ...]] = ("hybrid",)
    only: ClassVar[Mapping[str, tuple[Any, ...]]] = {"hidden_act": ("gelu",), "tie_word_embeddings": (True,)}

    num_mem_blocks: int
    use_mem_rope: bool

    def contradictions_of_heads(self) -> Iterator[str]:
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads or self.num_attention_heads
        if heads % kv_heads:
            yield f"num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}"
        if self.rope_dim < 1:
            yield f"num_attention_heads={heads} is more than twice hidden_size={self.hidden_size}"
        elif self.use_mem_rope and self.rope_dim % 2:
            yield f"head_dim={self.rope_dim} is odd: rotary positions need pairs"

    def disagreements(self, raw: Mapping[str, Any]) -> Iterator[str]:
        computed = {"attention_hidden_size": 2 * self.hidden_size, "hybrid_layer_ids": list(self.layers_of("hybrid"))}
        for key, value in computed.items():
            if raw.get(key) not in (None, value):
                yield f"{key}={short(raw[key])} is not {short(value)}, which follows from other keys"

    @property
    def ropes(self) -> tuple[Rope | None, ...]:
        return (self.rope if self.use_mem_rope else None,) * self.num_hidden_layers

    @property
    def sizes(self) -> dict[str, int]:
        return {
            **super().sizes,
            "A": self.hidden_size,
            "H": self.head_dim or 2 * self.hidden_size // self.num_attention_heads,
            "joined_width": 2 * self.hidden_size,
        }

    @property
    def layer_sets(self) -> dict[str, Sequence[int]]:
        layers, shared = self.layers_of("hybrid"), self.num_mem_blocks
        sets: dict[str, Sequence[int]] = {**super().layer_sets, "sharing_layers": layers[:shared]}
        for block in range(MOST_SHARED):
            uses = range(block, len(layers), shared) if block < shared else range(0)
            users = tuple(layers[use] for use in uses)
            sets |= {f"sharing_{block}": users[:1], f"repeating_{block}": users[1:], f"uses_{block}": uses}
        return sets

    @property
    def weight_sharing_layers(self) -> frozenset[int]:
        layers = self.layers_of("hybrid")
        return frozenset(layers if len(layers) > self.num_mem_blocks else ())

    @property
    def unscannable(self) -> str:
        return "layers share the weights of attention"

    @property
    def inseparable(self) -> str:
        return "layers share the weights of attention, and read the embeddings of tokens"


@family_config
class Config(SharedBlocks, MambaConfig):
    """The keys of config.json. The state is Mamba-2's, and each use of a shared block has adapters of its own."""

    model_type: ClassVar[str] = "zamba2"
    hf_names: ClassVar[Mapping[str, str]] = {
        "layer_types": "layers_block_type",
        "mamba_n_heads": "n_mamba_heads",
        "mamba_n_groups": "mamba_ngroups",
        "mamba_d_head": "mamba_headdim",
        "mamba_proj_bias": "add_bias_linear",
        "head_dim": "attention_head_dim",
    }
    only: ClassVar = {**SharedBlocks.only, "use_long_context": (False,)}
    most: ClassVar = {"num_mem_blocks": MOST_SHARED}
    derived: ClassVar[frozenset[str]] = MambaConfig.derived | {"mamba_conv_bias", "time_step_limit"}
    left_out: ClassVar[frozenset[str]] = frozenset(
        {
            *("attention_hidden_size", "hybrid_layer_ids", "kv_channels", "num_query_groups", "use_conv_bias"),
            *("use_mamba_kernels", "use_mem_eff_path", "num_logits_to_keep"),
        }
    )

    intermediate_size: int = 10240
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    layer_types: tuple[str, ...] | None = None
    mamba_d_head: int | None = None
    mamba_conv_bias: bool = True
    time_step_min: float
    time_step_limit: tuple[float, ...] = (0.0, NO_LIMIT)
    use_shared_attention_adapter: bool
    adapter_rank: int

    @classmethod
    def in_our_keys(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """As `MambaConfig.in_our_keys`. Without a width of MLPs it is four times the model's."""
        out = super().in_our_keys(raw)
        if not out.get("intermediate_size") and type(width := out.get("hidden_size", cls.hidden_size)) is int:
            out["intermediate_size"] = 4 * width
        return out

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        heads, kv_heads, size = (self.sizes[letter] for letter in "NKH")
        if self.use_shared_attention_adapter and {heads * size, kv_heads * size} != {2 * self.hidden_size}:
            yield (
                f"use_shared_attention_adapter needs queries, keys and values of twice hidden_size={self.hidden_size}, "
                f"not {heads} and {kv_heads} heads of {size}"
            )

    @property
    def kinds(self) -> tuple[str, ...]:
        return self.layer_types or KINDS_OF_RELEASE

    @property
    def step_limits(self) -> tuple[float, float]:
        return self.time_step_min, NO_LIMIT

    @property
    def sizes(self) -> dict[str, int]:
        return {**super().sizes, "adapter_rank": self.adapter_rank}


_MIXER = (
    *under("mamba", "mamba", *MAMBA, MAMBA_NORM, MAMBA_CONV_BIAS),
    *when("mamba_proj_bias", *under("mamba", "mamba", MAMBA_IN_BIAS, MAMBA_OUT_BIAS)),
    Map("input_layernorm.weight", "mamba_norm.scale", "D"),
)
SHARED_BLOCK = (
    Map("input_layernorm.weight", "attn_norm.scale", "joined_width"),
    *JOINED_ATTENTION,
    Map("pre_ff_layernorm.weight", "mlp_norm.scale", "D"),
)
"""The rows of a shared block without its MLP."""
_SHARED_ROWS = (
    *SHARED_BLOCK,
    *under("feed_forward", "mlp", *FUSED_MLP),
    *when(
        "mamba_proj_bias",
        Map("feed_forward.gate_up_proj.bias", ("mlp.gate.bias", "mlp.up.bias"), "(F + F) -> F, F"),
        Map("feed_forward.down_proj.bias", "mlp.down.bias", "D"),
    ),
)
_HEADS = {"q": "N", "k": "K", "v": "K"}


def _adapters(block: int) -> Iterator[Map]:
    """Yields the rows of the adapters of a shared block, one of each for each of its uses."""
    for name, heads in _HEADS.items():
        theirs, ours = f"self_attn.linear_{name}_adapter_list.{{uses_{block}}}", f"adapters.{{#uses_{block}}}.{name}"
        yield from when(
            "use_shared_attention_adapter",
            Map(f"{theirs}.0.weight", f"{ours}.down.kernel", "adapter_rank joined_width -> joined_width adapter_rank"),
            Map(f"{theirs}.1.weight", f"{ours}.up.kernel", f"({heads} H) adapter_rank -> adapter_rank {heads} H"),
        )
    theirs, ours = f"feed_forward.gate_up_proj_adapter_list.{{uses_{block}}}", f"adapters.{{#uses_{block}}}.mlp"
    yield Map(f"{theirs}.0.weight", f"{ours}.down.kernel", "adapter_rank D -> D adapter_rank")
    yield Map(
        f"{theirs}.1.weight",
        (f"{ours}.gate.kernel", f"{ours}.up.kernel"),
        "(F + F) adapter_rank -> adapter_rank F, adapter_rank F",
    )


_SHARED = "shared_transformer"
TABLE = MappingTable(
    (
        Map("model.embed_tokens.weight", "embed.embedding", "V D"),
        *under("model.layers.{state_layers}", "layers.{state_layers}", *_MIXER),
        *under("model.layers.{attention_layers}.mamba_decoder", "layers.{attention_layers}", *_MIXER),
        Map("model.layers.{attention_layers}.linear.weight", "layers.{attention_layers}.mix.kernel", "D A -> A D"),
        *under(f"model.layers.{{sharing_layers}}.{_SHARED}", "layers.{sharing_layers}", *_SHARED_ROWS),
        *(
            row
            for block in range(MOST_SHARED)
            for row in under(
                f"model.layers.{{sharing_{block}}}.{_SHARED}", f"layers.{{sharing_{block}}}", *_adapters(block)
            )
        ),
        Map("model.final_layernorm.weight", "norm.scale", "D"),
    ),
    copies={
        "lm_head.weight": "model.embed_tokens.weight",
        **{
            f"model.layers.{{repeating_{block}}}.{_SHARED}.{name}": f"model.layers.{{sharing_{block}}}.{_SHARED}.{name}"
            for block in range(MOST_SHARED)
            for row in (*_SHARED_ROWS, *_adapters(block))
            for name in row.hf_names
        },
    },
)

FAMILY = family(Config, TABLE, "Zamba2 1.2B to 7B", "Zamba2ForCausalLM")
