"""Granite: Llama with four factors; Bamba, which has its layers with Mamba-2; and Aria, which has its experts."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.hybrid import NO_LIMIT, MambaConfig
from tpuconv.models.common.partial_rope import PartialRopeConfig
from tpuconv.models.common.rope import Rope
from tpuconv.models.common.rows import (
    BIASED_ATTENTION,
    FUSED_EXPERTS,
    FUSED_SHARED,
    MAMBA_ROWS,
    MLP,
    MLP_BIAS,
    PRE_NORMS,
    SHARED_EXPERT_ROWS,
    STACKED_EXPERTS,
    decoder_table,
    when,
)
from tpuconv.models.common.sparse import ChosenExperts
from tpuconv.models.common.windows import PatternConfig
from tpuconv.models.common.wrapper import BRINGS, LLAVA
from tpuconv.models.declare import config_class, decoder, wrapper
from tpuconv.models.parts import Attn, Experts, Factors, Mlp, Norms
from tpuconv.models.towers.granite_docling.family import DOCLING_VISION
from tpuconv.models.towers.navit.family import ARIA_VISION
from tpuconv.models.towers.qformer.family import GRANITE4_WAYS
from tpuconv.notation.table import Map, MappingTable, under


class ScaledConfig(DecoderConfig):
    """Features of images and sounds have the factor of embeddings too."""

    embedding_multiplier: float

    @property
    def feature_factor(self) -> float:
        return self.embedding_multiplier


class GraniteConfig(ScaledConfig):
    """`attention_multiplier` is the factor of scores, and not beside another one."""

    logits_scaling: float

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.logits_scaling == 0:
            yield "logits_scaling=0 divides the logits"


GRANITE = decoder(
    "granite",
    "Granite 3, dense",
    "GraniteForCausalLM",
    Norms(),
    Attn("attention_bias", scale="attention_multiplier"),
    Mlp(bias="mlp_bias"),
    Factors(embedding="embedding_multiplier", residual="residual_multiplier", divisor="logits_scaling"),
    config=GraniteConfig,
)

GRANITE_DOCLING = wrapper(
    "granite_docling",
    "Granite for Docling 500M",
    "GraniteDoclingForConditionalGeneration",
    text=GRANITE,
    prefix="model.text_model.",
    head="lm_head.",
    outside_keys=frozenset({"density_router_hidden_size", "density_router_threshold", "density_router_loss_weight"}),
    tied=True,
    defaults={"tie_word_embeddings": False},
    modalities=(DOCLING_VISION,),
)


class PlainFeatures:
    """Features do not have the factor of embeddings, which are 0 in their place."""

    feature_factor: ClassVar[float] = 1.0


GRANITE4_VISION = wrapper(
    "granite4_vision",
    "Granite Vision 4",
    "Granite4VisionForConditionalGeneration",
    text=GRANITE,
    tensors={"image_newline": BRINGS},
    mixins=(PlainFeatures,),
    outside_keys=frozenset(
        {
            *("qformer_config", "downsample_rate", "deepstack_layer_map", "spatial_vision_layer"),
            *("spatial_target_layers", "vocab_size", "hidden_size", "ignore_index"),
        }
    ),
    modalities=GRANITE4_WAYS,
)


class HyperClovaConfig(ScaledConfig):
    """The heads divide the width of the model."""

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.hidden_size % self.num_attention_heads:
            yield f"hidden_size={self.hidden_size} is not a multiple of num_attention_heads={self.num_attention_heads}"


HYPERCLOVAX = decoder(
    "hyperclovax",
    "HyperCLOVA X SEED Think 14B",
    "HyperCLOVAXForCausalLM",
    Norms(module="modules.granite:PostNormedBlock"),
    Attn("attention_bias", scale="attention_multiplier"),
    Mlp(bias="mlp_bias"),
    Factors(embedding="embedding_multiplier", residual="residual_multiplier", logits="logits_scaling"),
    config=HyperClovaConfig,
    keys={"attention_multiplier": float | None, "use_post_norm": bool},
    defaults={"head_dim": None},
    table=GRANITE.table.with_rows(
        (
            *GRANITE.table.rows,
            *when(
                "use_post_norm",
                Map("model.layers.{L}.post_norm1.weight", "layers.{L}.post_attn_norm.scale", "D"),
                Map("model.layers.{L}.post_norm2.weight", "layers.{L}.post_mlp_norm.scale", "D"),
            ),
        )
    ),
)


class SharedExpertConfig(DecoderConfig):
    """With an MLP that all tokens pass beside the experts, if it has a width."""

    least: ClassVar = {"shared_intermediate_size": 0}

    shared_intermediate_size: int

    @property
    def sizes(self) -> dict[str, int]:
        return {**super().sizes, "W": self.shared_intermediate_size}

    @property
    def has_shared_expert(self) -> bool:
        """True if all tokens pass an MLP beside the experts."""
        return bool(self.shared_intermediate_size)


class NoSharedExpert:
    """Experts alone."""

    has_shared_expert: ClassVar[bool] = False


OF_EXPERTS = {"num_local_experts": int, "num_experts_per_tok": int}
EXPERT_FACTS: Mapping[str, Any] = {"experts_key": "num_local_experts", "only": {"mlp_bias": (False,)}}
GraniteShared = config_class(
    (SharedExpertConfig, ChosenExperts, GRANITE.config),
    {**OF_EXPERTS, "shared_intermediate_size": int},
    {"head_dim": None},
    model_type="granitemoeshared",
    **EXPERT_FACTS,
)

GRANITEMOE = GRANITE.but(
    "granitemoe",
    "Granite 3, mixture of experts",
    "GraniteMoeForCausalLM",
    Experts(
        below="",
        module="modules.experts:BestExperts",
        rows=(
            *under("block_sparse_moe", "moe", *FUSED_EXPERTS),
            *under("shared_mlp", "moe.shared", *when("has_shared_expert", *FUSED_SHARED)),
        ),
    ),
    config=(NoSharedExpert, ChosenExperts, GRANITE.config),
    keys=OF_EXPERTS,
    types={"GraniteMoeSharedForCausalLM": "granitemoeshared"},
    variants={"granitemoeshared": GraniteShared},
    **EXPERT_FACTS,
)


@family_config
class GraniteWindows(PatternConfig):
    """Granite with sliding windows in all layers but every fourth. A layer whose entry of `layer_rope_theta` is 0 has
    no rotary positions."""

    layer_rope_theta: tuple[float, ...] | None

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        thetas = self.layer_rope_theta
        if thetas is not None and len(thetas) != self.num_hidden_layers:
            yield f"layer_rope_theta has {len(thetas)} entries for num_hidden_layers={self.num_hidden_layers}"
        if wrong := [theta for theta in thetas or () if theta and theta <= 1]:
            yield f"layer_rope_theta has {wrong[0]}, of which rotary positions cannot be made"

    @property
    def kinds(self) -> tuple[str, ...]:
        if self.layer_types is not None:
            return self.layer_types
        return tuple("sliding_attention" if i % 4 else "full_attention" for i in range(self.num_hidden_layers))

    @property
    def ropes(self) -> tuple[Rope | None, ...]:
        if self.layer_rope_theta is None:
            return super().ropes
        return tuple(replace(self.rope, theta=float(theta)) if theta else None for theta in self.layer_rope_theta)


SINKS = Map("model.layers.{L}.self_attn.sinks", "layers.{L}.attn.sinks", "N")
SINK_ATTENTION = Attn("attention_bias", scale="attention_multiplier", module="common.sinks:SinkAttention")

GRANITE_SWA = GRANITE.but(
    "granite_swa",
    "Granite with sliding windows, dense",
    "GraniteSWAForCausalLM",
    SINK_ATTENTION,
    config=(GraniteWindows, GRANITE.config),
    table=GRANITE.table.with_rows((*GRANITE.table.rows, SINKS)),
)

GRANITEMOE_SWA = GRANITE.but(
    "granitemoe_swa",
    "Granite with sliding windows, mixture of experts",
    "GraniteMoeSWAForCausalLM",
    SINK_ATTENTION,
    Experts(
        below="",
        module="modules.experts:BestExperts",
        rows=(
            *under("block_sparse_moe", "moe", Map("router.weight", "router.kernel", "E D -> D E"), *STACKED_EXPERTS),
            *under("shared_mlp", "moe.shared", *when("has_shared_expert", *FUSED_SHARED)),
        ),
    ),
    config=(GraniteWindows, GraniteShared),
    others=(SINKS,),
)


@family_config
class GraniteHybridConfig(MambaConfig):
    """`intermediate_size` is the width of one expert, `shared_intermediate_size` the width of the MLP which all tokens
    pass. There may be no experts, and no layers with Mamba-2."""

    least: ClassVar[Mapping[str, int]] = {"num_local_experts": 0, "num_experts_per_tok": 0}

    num_local_experts: int
    num_experts_per_tok: int
    shared_intermediate_size: int
    position_embedding_type: str | None

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        chosen, experts = self.num_experts_per_tok, self.num_local_experts
        if experts and not 0 < chosen <= experts:
            yield f"num_experts_per_tok={chosen} is not between 1 and num_local_experts={experts}"

    @property
    def kinds(self) -> tuple[str, ...]:
        return self.layer_types or (self.state_kind,) * self.num_hidden_layers

    @property
    def ropes(self) -> tuple[Rope | None, ...]:
        return super().ropes if self.position_embedding_type == "rope" else (None,) * self.num_hidden_layers

    @property
    def sizes(self) -> dict[str, int]:
        return {
            **super().sizes,
            "E": self.num_local_experts,
            "M": self.intermediate_size,
            "W": self.shared_intermediate_size,
        }

    @property
    def layer_sets(self) -> dict[str, Sequence[int]]:
        return {**super().layer_sets, "J": tuple(range(self.num_hidden_layers)) if self.has_experts else ()}

    @property
    def has_experts(self) -> bool:
        """True if layers have experts, besides the MLP that all tokens pass."""
        return self.num_local_experts > 0

    @property
    def has_shared_expert(self) -> bool:
        """True if all tokens pass an MLP beside experts."""
        return self.has_experts


OF_MAMBA: Mapping[str, Any] = {"mamba_d_head": None, "time_step_limit": (0.0, NO_LIMIT)}
"""Defaults, which transformers writes as "auto" and infinity."""
WITH_MAMBA = Norms(module="common.mamba2:MambaBlock")
OF_BOTH = (
    *under("model.layers.{attention_layers}", "layers.{attention_layers}", *Attn("attention_bias").table_rows),
    *under("model.layers.{state_layers}.mamba", "layers.{state_layers}.attn", *MAMBA_ROWS),
)
"""Attention in some layers, Mamba-2 in the others."""

GRANITEMOEHYBRID = GRANITE.but(
    "granitemoehybrid",
    "Granite 4",
    "GraniteMoeHybridForCausalLM",
    WITH_MAMBA,
    Mlp(width="W"),
    Experts(layers="some", module="modules.experts:BestExperts"),
    config=(GraniteHybridConfig, GRANITE.config),
    defaults={**OF_MAMBA},
    only={"mlp_bias": (False,)},
    base="common.mamba2:MambaDecoder",
    table=decoder_table(
        *PRE_NORMS,
        *under("block_sparse_moe", "moe", *when("has_experts", *FUSED_EXPERTS)),
        *under("shared_mlp", "moe.shared", *when("has_experts", *FUSED_SHARED)),
        *under("shared_mlp", "mlp", *when("not has_experts", *FUSED_SHARED)),
        others=OF_BOTH,
    ),
)


@family_config
class BambaConfig(MambaConfig, PartialRopeConfig):
    """The layers `attn_layer_indices` have attention; half of each head has rotary positions unless `rope_parameters`
    says otherwise. `partial_rotary_factor` has no effect outside of them."""

    left_out: ClassVar[frozenset[str]] = frozenset({"partial_rotary_factor"})

    head_dim: int | None = None
    partial_rotary_factor: float = 0.5
    attn_layer_indices: tuple[int, ...] | None
    layer_types: tuple[str, ...] | None = None

    @property
    def kinds(self) -> tuple[str, ...]:
        chosen = self.attn_layer_indices or ()
        return tuple("full_attention" if i in chosen else self.state_kind for i in range(self.num_hidden_layers))


BAMBA = decoder(
    "bamba",
    "Bamba",
    "BambaForCausalLM",
    WITH_MAMBA,
    Attn("attention_bias"),
    Mlp(bias="mlp_bias"),
    config=BambaConfig,
    defaults=OF_MAMBA,
    base="common.mamba2:MambaDecoder",
    table=MappingTable(
        (
            Map("model.embed_tokens.weight", "embed.embedding", "V D"),
            *under(
                "model.layers.{L}",
                "layers.{L}",
                Map("input_layernorm.weight", "attn_norm.scale", "D"),
                Map("pre_ff_layernorm.weight", "mlp_norm.scale", "D"),
                *under("feed_forward", "mlp", *MLP, *when("mlp_bias", *MLP_BIAS)),
            ),
            *OF_BOTH,
            Map("model.final_layernorm.weight", "norm.scale", "D"),
            Map("lm_head.weight", "lm_head.kernel", "V D -> D V", when="has_lm_head"),
        ),
        copies={"lm_head.weight": "model.embed_tokens.weight"},
    ),
)


@family_config
class AriaConfig(ChosenExperts, DecoderConfig):
    """`intermediate_size` is the width of one expert."""

    experts_key: ClassVar[str] = "moe_num_experts"
    has_shared_expert: ClassVar[bool] = True

    moe_num_experts: int
    num_experts_per_tok: int
    moe_num_shared_experts: int

    @property
    def sizes(self) -> dict[str, int]:
        return {**super().sizes, "W": self.intermediate_size * self.moe_num_shared_experts}


ARIA_TEXT = decoder(
    "aria_text",
    "the text model of Aria, saved on its own",
    "AriaTextForCausalLM",
    Norms(),
    Attn("attention_bias"),
    Experts(module="modules.experts:BestExperts"),
    config=AriaConfig,
    only={"mlp_bias": (False,)},
    hf_names={"num_experts_per_tok": "moe_topk"},
    table=decoder_table(
        *PRE_NORMS,
        *BIASED_ATTENTION,
        *under(
            "mlp",
            "moe",
            Map("router.weight", "router.kernel", "E D -> D E"),
            Map("experts.fc1.weight", ("gate.kernel", "up.kernel"), "E D (M + M) -> E D M, E D M"),
            Map("experts.fc2.weight", "down.kernel", "E M D"),
            *SHARED_EXPERT_ROWS,
        ),
    ),
)

ARIA = wrapper(
    "aria",
    "Aria",
    "AriaForConditionalGeneration",
    text=ARIA_TEXT,
    outside=LLAVA,
    prefix="language_model.model.",
    outside_keys=frozenset({"max_value_projector_patch_to_query_dict"}),
    modalities=(ARIA_VISION,),
)
