"""Models with state spaces: Mamba 2, Mamba and Falcon Mamba in every layer, Jamba in most."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.hybrid import NO_LIMIT, WITHOUT_ATTENTION, ChannelConfig, MambaConfig, StatesAlone
from tpuconv.models.common.rope import Rope
from tpuconv.models.common.rows import ATTENTION, EXPERT_MLPS, MAMBA1_ROWS, MAMBA_ROWS, MLP
from tpuconv.models.common.sparse import ChosenExperts
from tpuconv.models.declare import decoder
from tpuconv.models.parts import Attn, Experts, Mlp, Norms
from tpuconv.notation.table import Map, MappingTable, under

KEYS_OF_MIXERS: Mapping[str, str] = {
    "rms_norm_eps": "layer_norm_epsilon",
    "mamba_d_state": "state_size",
    "mamba_d_conv": "conv_kernel",
    "mamba_expand": "expand",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_proj_bias": "use_bias",
}
"""The keys of models without attention, where there is no other part that they could belong to."""

NAMES_OF_AUTHORS = {"backbone.embedding": "backbone.embeddings"}
"""The names of modules in the releases of the authors of Mamba, where transformers has others."""


def table_of_states(*rows: Map) -> MappingTable:
    """Returns the table of a model with these rows of a layer, besides its norm."""
    return MappingTable(
        (
            Map("backbone.embeddings.weight", "embed.embedding", "V D"),
            Map("backbone.layers.{L}.norm.weight", "layers.{L}.norm.scale", "D"),
            *under("backbone.layers.{L}.mixer", "layers.{L}.attn", *rows),
            Map("backbone.norm_f.weight", "norm.scale", "D"),
            Map("lm_head.weight", "lm_head.kernel", "V D -> D V", when="has_lm_head"),
        ),
        copies={"lm_head.weight": "backbone.embeddings.weight"},
    )


class Mamba2Config(StatesAlone, MambaConfig):
    """The keys of config.json. `time_step_rank` has no effect, and `time_step_min` is of initial values."""

    left_out: ClassVar[frozenset[str]] = StatesAlone.left_out | {"time_step_min", "time_step_rank"}
    hf_names: ClassVar[Mapping[str, str]] = {
        **KEYS_OF_MIXERS,
        "mamba_n_heads": "num_heads",
        "mamba_n_groups": "n_groups",
        "mamba_d_head": "head_dim",
    }


MAMBA2 = decoder(
    "mamba2",
    "Mamba 2, Codestral Mamba",
    "Mamba2ForCausalLM",
    Norms(module="modules.state_spaces:Mamba2Block"),
    config=Mamba2Config,
    keys={"residual_in_fp32": bool},
    defaults={**WITHOUT_ATTENTION, "time_step_limit": (0.0, NO_LIMIT)},
    base="modules.state_spaces:Mamba2Decoder",
    table=table_of_states(*MAMBA_ROWS),
    modules=NAMES_OF_AUTHORS,
)


class Mamba1Config(StatesAlone, ChannelConfig):
    """The keys of config.json. `intermediate_size` is the number of channels, if it is not `expand` times the model
    width; `time_step_min` is of initial values."""

    derived: ClassVar[frozenset[str]] = StatesAlone.derived - {"intermediate_size"}
    left_out: ClassVar[frozenset[str]] = StatesAlone.left_out - {"intermediate_size"} | {"time_step_min"}
    hf_names: ClassVar[Mapping[str, str]] = {**KEYS_OF_MIXERS, "mamba_dt_rank": "time_step_rank"}

    @property
    def sizes(self) -> dict[str, int]:
        sizes = super().sizes
        return sizes if self.intermediate_size is None else {**sizes, "channels": self.intermediate_size}


OF_CHANNELS: Mapping[str, Any] = {"mamba_dt_rank": None, "intermediate_size": None}
"""Defaults, which transformers computes."""

MAMBA = decoder(
    "mamba",
    "Mamba, the first version",
    "MambaForCausalLM",
    Norms(module="modules.state_spaces:Mamba1Block"),
    config=Mamba1Config,
    keys={"residual_in_fp32": bool, "intermediate_size": int | None},
    defaults={**WITHOUT_ATTENTION, **OF_CHANNELS},
    base="modules.state_spaces:Mamba1Decoder",
    table=table_of_states(*MAMBA1_ROWS),
    modules=NAMES_OF_AUTHORS,
)

FALCON_MAMBA = MAMBA.but(
    "falcon_mamba",
    "Falcon Mamba 7B",
    "FalconMambaForCausalLM",
    Norms(module="modules.state_spaces:PlainNormedBlock"),
    keys={"mixer_rms_eps": float, "intermediate_size": int | None},
    defaults={**WITHOUT_ATTENTION, **OF_CHANNELS},
)


@family_config
class JambaConfig(ChosenExperts, ChannelConfig):
    """Of every `attn_layer_period` layers the one at `attn_layer_offset` has attention, of every `expert_layer_period`
    the one at `expert_layer_offset` has experts, if there are several. Nothing is rotated."""

    derived: ClassVar[frozenset[str]] = ChannelConfig.derived | {"layer_types"}
    least: ClassVar[Mapping[str, int]] = {"attn_layer_offset": 0, "expert_layer_offset": 0}
    norm_topk_prob: ClassVar[bool] = False

    layer_types: tuple[str, ...] | None = None
    num_experts: int
    num_experts_per_tok: int
    attn_layer_period: int
    attn_layer_offset: int
    expert_layer_period: int
    expert_layer_offset: int

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        for kind in ("attn", "expert"):
            period, offset = getattr(self, f"{kind}_layer_period"), getattr(self, f"{kind}_layer_offset")
            if offset >= period:
                yield f"{kind}_layer_offset={offset} is not less than {kind}_layer_period={period}"

    @property
    def kinds(self) -> tuple[str, ...]:
        period, offset = self.attn_layer_period, self.attn_layer_offset
        return tuple(
            "full_attention" if layer % period == offset else self.state_kind for layer in range(self.num_hidden_layers)
        )

    @property
    def layer_sets(self) -> dict[str, Sequence[int]]:
        layers, period, offset = range(self.num_hidden_layers), self.expert_layer_period, self.expert_layer_offset
        sparse = tuple(layer for layer in layers if self.num_experts > 1 and layer % period == offset)
        return {**super().layer_sets, "I": tuple(layer for layer in layers if layer not in sparse), "J": sparse}

    @property
    def ropes(self) -> tuple[Rope | None, ...]:
        return (None,) * self.num_hidden_layers


NORMS_OF_MAMBA1 = (
    Map("dt_layernorm.weight", "dt_norm.scale", "step_rank"),
    Map("b_layernorm.weight", "b_norm.scale", "key_dim"),
    Map("c_layernorm.weight", "c_norm.scale", "key_dim"),
)

JAMBA = decoder(
    "jamba",
    "Jamba, Jamba 1.5 to 1.7, Jamba Reasoning",
    "JambaForCausalLM",
    Norms(module="common.mamba1:NormedMamba1Block"),
    Attn(),
    Mlp(),
    Experts("some", module="modules.experts:ProbableExperts"),
    config=JambaConfig,
    defaults={"mamba_dt_rank": None},
    base="common.mamba1:Mamba1Hybrid",
    table=MappingTable(
        (
            Map("model.embed_tokens.weight", "embed.embedding", "V D"),
            Map("model.layers.{L}.input_layernorm.weight", "layers.{L}.attn_norm.scale", "D"),
            Map("model.layers.{L}.pre_ff_layernorm.weight", "layers.{L}.mlp_norm.scale", "D"),
            *under("model.layers.{attention_layers}", "layers.{attention_layers}", *ATTENTION),
            *under("model.layers.{state_layers}.mamba", "layers.{state_layers}.attn", *MAMBA1_ROWS, *NORMS_OF_MAMBA1),
            *under("model.layers.{I}.feed_forward", "layers.{I}.mlp", *MLP),
            *under(
                "model.layers.{J}.feed_forward",
                "layers.{J}.moe",
                Map("router.weight", "router.kernel", "E D -> D E"),
                *EXPERT_MLPS,
            ),
            Map("model.final_layernorm.weight", "norm.scale", "D"),
            Map("lm_head.weight", "lm_head.kernel", "V D -> D V", when="has_lm_head"),
        ),
        copies={"lm_head.weight": "model.embed_tokens.weight"},
    ),
)
