"""Mixtures of experts with the attention of Llama or Qwen3."""

from collections.abc import Mapping
from typing import ClassVar

from tpuconv.models.bailing_hybrid.family import LING_ONLY, SharedOfOneWidth, ling_table
from tpuconv.models.bailing_moe_v2_5.family import DECAYS_IGNORE, LING_LIGHTNING_ROWS, LightningConfig
from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.gpt import qkv_rows
from tpuconv.models.common.rope import PLAIN_ROPE, Rope
from tpuconv.models.common.rows import (
    ATTENTION,
    ATTN_NORM,
    BIASED_ATTENTION,
    CORRECTED_ROUTER,
    EXPERT_MLPS,
    FURTHER_TOKENS,
    HEAD_NORMS,
    MTP_FINAL,
    NUMBERED_EXPERT_MLPS,
    O_BIAS,
    PRE_NORMS,
    PROBABLE_EXPERTS,
    QKV_BIAS,
    SHARED,
    SHARED_EXPERT_ROWS,
    decoder_table,
    mlp_rows,
    when,
)
from tpuconv.models.common.sparse import ChosenExperts, FurtherLayers, MixedMLPs, SparseConfig, stepped_mlp_kinds
from tpuconv.models.common.windows import ROPES_OF_WINDOWS, OneWindow, PatternConfig, TwoRopesConfig
from tpuconv.models.declare import decoder
from tpuconv.models.lineages.glm import GLM4_MOE
from tpuconv.models.parts import Attn, Experts, Factors, Mtp, Norms
from tpuconv.notation.table import Map, under

MIXTRAL = decoder(
    "mixtral",
    "Mixtral",
    "MixtralForCausalLM",
    Norms(
        between=True,
        module="common.blocks:MoeNormBlock",
        rows=(ATTN_NORM, Map("post_attention_layernorm.weight", "moe_norm.scale", "D")),
    ),
    Attn(),
    Experts(
        below="block_sparse_moe",
        module="modules.experts:NormalizedExperts",
        rows=(Map("gate.weight", "router.kernel", "E D -> D E"), *NUMBERED_EXPERT_MLPS),
        keys=("num_local_experts", "num_experts_per_tok", "sliding_window"),
    ),
    config=(OneWindow, ChosenExperts, DecoderConfig),
    experts_key="num_local_experts",
)

SIGMOID_EXPERTS = Experts(
    "some or all",
    module="deepseek_v3.modules:MoE",
    rows=(*CORRECTED_ROUTER, *EXPERT_MLPS, *SHARED_EXPERT_ROWS),
)


@family_config
class Dots1Config(SparseConfig, PatternConfig):
    """Without `layer_types` the layers from `max_window_layers` on have the window, if there is one. transformers has
    no numbers of experts for a file without them; these come from the released model."""

    max_window_layers: int

    @property
    def kinds(self) -> tuple[str, ...]:
        if self.layer_types is not None:
            return self.layer_types
        first = self.num_hidden_layers if self.sliding_window is None else self.max_window_layers
        return tuple("sliding_attention" if i >= first else "full_attention" for i in range(self.num_hidden_layers))


DOTS1 = decoder(
    "dots1",
    "dots.llm1",
    "Dots1ForCausalLM",
    Norms(),
    Attn("attention_bias", norms="each head"),
    SIGMOID_EXPERTS,
    config=Dots1Config,
    only={"mlp_layer_types": (None,), "moe_layer_freq": (1,), "scoring_func": ("noaux_tc", "sigmoid")},
    least={"first_k_dense_replace": 0, "max_window_layers": 0},
    defaults={"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6},
)

SOLAR_OPEN = decoder(
    "solar_open",
    "Solar Open 100B",
    "SolarOpenForCausalLM",
    Norms(),
    Attn("attention_bias", out_bias=False),
    SIGMOID_EXPERTS,
    config=SparseConfig,
    only={"first_k_dense_replace": (0,), "mlp_layer_types": (None,), "use_qk_norm": (False,)},
    least={"first_k_dense_replace": 0},
    defaults={"intermediate_size": 10240},
)

HY_V3 = decoder(
    "hy_v3",
    "Hy3",
    "HYV3ForCausalLM",
    Norms(),
    Attn("attention_bias", norms="each head"),
    Experts(
        "some or all",
        module="deepseek_v3.modules:MoE",
        rows=(
            Map("router.gate.weight", "router.kernel", "E D -> D E"),
            Map("expert_bias", "router.correction", "E", buffer=True),
            *EXPERT_MLPS,
            *under("shared_mlp", "shared", *SHARED),
        ),
    ),
    Mtp(rows=MTP_FINAL),
    config=(FurtherLayers, SparseConfig),
    keys={"num_nextn_predict_layers": int},
    defaults={"num_nextn_predict_layers": 1, "first_k_dense_replace": 1},
    only={"mlp_bias": (False,), "enable_moe_fp32_combine": (True, False)},
    least={"first_k_dense_replace": 0, "num_nextn_predict_layers": 0},
    hf_names={
        "n_routed_experts": "num_experts",
        "n_shared_experts": "num_shared_experts",
        "routed_scaling_factor": "router_scaling_factor",
    },
    # Experts are chosen among all, and their weights are normalized.
    derived=SparseConfig.derived | {"n_group", "topk_group", "norm_topk_prob"},
)


LING2_ROWS = (
    *qkv_rows("attention.query_key_value", bias="attention_bias"),
    Map("attention.query_layernorm.weight", "attn.q_norm.scale", "H"),
    Map("attention.key_layernorm.weight", "attn.k_norm.scale", "H"),
    Map("attention.dense.weight", "attn.o.kernel", "D (N H) -> N H D"),
)

BAILING_MOE = GLM4_MOE.but(
    "bailing_moe",
    "Ling 2, Ring 2",
    "BailingMoeV2ForCausalLM",
    config=(SharedOfOneWidth, GLM4_MOE.config),
    only={**LING_ONLY, "rope_interleave": (False,)},
    aliases={
        "num_experts": "n_routed_experts",
        "num_shared_experts": "n_shared_experts",
        "use_qkv_bias": "attention_bias",
    },
    default_rope={"rope_theta": 600000.0},
    keys={"moe_shared_expert_intermediate_size": int | None},
    defaults={
        **{"vocab_size": 157184, "hidden_size": 2048, "intermediate_size": 5120, "moe_intermediate_size": 512},
        **{"moe_shared_expert_intermediate_size": None, "num_hidden_layers": 20, "num_nextn_predict_layers": 0},
        **{"num_attention_heads": 16, "num_key_value_heads": 4, "n_routed_experts": 256, "routed_scaling_factor": 2.5},
        **{"n_group": 8, "topk_group": 4, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6},
        **{"partial_rotary_factor": 1.0, "use_qk_norm": True},
    },
    table=ling_table(*under("model.layers.{L}", "layers.{L}", *LING2_ROWS), further=LING2_ROWS),
)

PARAM2MOE = BAILING_MOE.but(
    "param2moe",
    "Param 2 17B-A2.4B",
    "Param2MoEForCausalLM",
    shared_together=True,
    only=BAILING_MOE.config.only,
    left_out=BAILING_MOE.config.left_out | {"mtp_loss_scaling_factor", "max_window_layers"},
    defaults={"routed_scaling_factor": 1.0},  # as `configuration_param2moe.py` of the release has it
)

LING1_TABLE = ling_table(*under("model.layers.{L}", "layers.{L}", *LING2_ROWS[:2], LING2_ROWS[-1]))

BAILING_MOE_V1 = decoder(
    "bailing_moe_v1",
    "Ling and Ring of the first versions, whose `norm_head` is false",
    "BailingMoeForCausalLM",
    Norms(),
    Attn("attention_bias", out_bias=False),
    Experts("some", module="deepseek_v3.modules:MoE", router="modules.deepseek:NormalizedRouter"),
    config=(SharedOfOneWidth, SparseConfig),
    only={
        **{key: values for key, values in LING_ONLY.items() if key in ("norm_head", "norm_softmax", "norm_topk_prob")},
        **dict.fromkeys(("use_bias", "use_qk_norm", "use_sliding_window", "moe_router_enable_expert_bias"), (False,)),
        **dict.fromkeys(("mlp_bias", "multi_gate"), (False,)),
        "score_function": ("softmax",),
    },
    least={"first_k_dense_replace": 0, "n_shared_experts": 0},
    aliases=BAILING_MOE.config.aliases,
    left_out=frozenset({"sliding_window", "max_window_layers"}),
    default_rope=BAILING_MOE.config.default_rope,
    keys={"moe_shared_expert_intermediate_size": int | None},
    # The sizes of inclusionAI/Ling-lite.
    defaults={
        **{"vocab_size": 126464, "hidden_size": 2048, "intermediate_size": 5632, "moe_intermediate_size": 1408},
        **{"moe_shared_expert_intermediate_size": None, "num_hidden_layers": 28, "num_attention_heads": 16},
        **{"num_key_value_heads": 4, "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6},
        **{"routed_scaling_factor": 1.0, "first_k_dense_replace": 0, "max_position_embeddings": 32768},
        **{"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "attention_bias": False},
    },
    table=LING1_TABLE.with_rows([row for row in LING1_TABLE.rows if not row.buffer]),
)

BAILING_MOE_LINEAR = BAILING_MOE.but(
    "bailing_moe_linear",
    "Ring Linear 2",
    "BailingMoeLinearV2ForCausalLM",
    Norms(module="bailing_moe_v2_5.modules:Block"),
    base="common.lightning:LightningDecoder",
    config=(BAILING_MOE.config, LightningConfig),
    only={**BAILING_MOE.config.only, **LightningConfig.only, "num_nextn_predict_layers": (0,)},
    least={**BAILING_MOE.config.least, **LightningConfig.least},
    # As servers read a file without them.
    defaults={"layer_group_size": 1, "group_norm_size": 1},
    table=ling_table(
        *under("model.layers.{attention_layers}", "layers.{attention_layers}", *LING2_ROWS),
        *LING_LIGHTNING_ROWS,
        ignore=DECAYS_IGNORE,
    ),
)

SARVAM_MOE = BAILING_MOE.but(
    "sarvam_moe",
    "Sarvam 30B",
    "SarvamMoEForCausalLM",
    "Glm4MoeForCausalLM",
    only={key: values for key, values in BAILING_MOE.config.only.items() if key != "norm_topk_prob"},
    defaults={"partial_rotary_factor": 1.0},
    table=BAILING_MOE.table,
)

MELLUM = decoder(
    "mellum",
    "Mellum 2",
    "MellumForCausalLM",
    Norms(),
    Attn("attention_bias", norms="each head"),
    Experts(
        "some or all",
        module="modules.experts:ProbableExperts",
        rows=PROBABLE_EXPERTS,
        keys=("moe_intermediate_size", "num_experts", "num_experts_per_tok", "norm_topk_prob"),
    ),
    # Without `layer_types` all layers see all tokens, without `mlp_layer_types` all have experts.
    config=(ChosenExperts, MixedMLPs, TwoRopesConfig),
    full_every=1,
    keys={
        "mlp_layer_types": tuple[str, ...] | None,
        "num_mtp_layers": int | None,
        "mtp_layer_types": tuple[str, ...] | None,
        "mtp_mlp_layer_types": tuple[str, ...] | None,
    },
    defaults={"rope": Rope(theta=500_000.0), "local_rope": PLAIN_ROPE},
    least={"num_mtp_layers": 0},
    synonyms={"num_local_experts": "num_experts"},
    aliases={"num_nextn_predict_layers": "num_mtp_layers"},
    ignore={"mtp.*": FURTHER_TOKENS},
)


class KolibriConfig(ChosenExperts, PatternConfig):
    """Without `layer_types` every fifth layer sees all tokens. With a window, only layers with it have rotary
    positions. `intermediate_size` has no effect, since no layer is dense."""

    full_every: ClassVar[int] = 5
    has_shared_experts: ClassVar[bool] = True

    @property
    def ropes(self) -> tuple[Rope | None, ...]:
        has_windows = self.sliding_window is not None
        return tuple(None if has_windows and kind == "full_attention" else self.rope for kind in self.kinds)


KOLIBRI1 = decoder(
    "kolibri1",
    "Kolibri 1",
    "Kolibri1ForCausalLM",
    Norms(
        "sandwich",
        rows=(
            *PRE_NORMS,
            Map("post_attn_norm.weight", "post_attn_norm.scale", "D"),
            Map("post_ffn_norm.weight", "post_mlp_norm.scale", "D"),
        ),
    ),
    Attn(norms="each head"),
    Experts(
        below="",
        module="deepseek_v3.modules:MoE",
        router="modules.moe:ScoreRouter",
        rows=(
            *under("mlp", "moe", *PROBABLE_EXPERTS, *SHARED_EXPERT_ROWS),
            Map("moe.router.expert_bias", "moe.router.correction", "E", buffer=True),
        ),
        keys=(
            *("moe_intermediate_size", "shared_expert_intermediate_size", "num_experts", "num_experts_per_tok"),
            "norm_topk_prob",
        ),
    ),
    config=KolibriConfig,
    synonyms={"num_local_experts": "num_experts"},
    defaults={"intermediate_size": 1},
)


@family_config
class AfmoeConfig(SparseConfig, PatternConfig):
    """Without `layer_types` every `global_attn_every_n_layers`-th layer sees all tokens, and has no rotary
    positions."""

    rope_fields: ClassVar[Mapping[str, str]] = ROPES_OF_WINDOWS
    hf_names: ClassVar[Mapping[str, str]] = {
        "n_routed_experts": "num_experts",
        "n_shared_experts": "num_shared_experts",
        "routed_scaling_factor": "route_scale",
        "first_k_dense_replace": "num_dense_layers",
    }

    mup_enabled: bool
    global_attn_every_n_layers: int

    @property
    def full_every(self) -> int:  # type: ignore[override]
        """The last of as many layers sees all tokens."""
        return self.global_attn_every_n_layers

    @property
    def embedding_factor(self) -> float:
        """The factor of embeddings."""
        return float(self.hidden_size**0.5) if self.mup_enabled else 1.0


AFMOE = decoder(
    "afmoe",
    "Trinity Nano, Mini, Large",
    "AfmoeForCausalLM",
    Norms(
        "sandwich",
        "scaled RMS",
        names=("input_layernorm", "post_attention_layernorm", "pre_mlp_layernorm", "post_mlp_layernorm"),
    ),
    Attn(
        "attention_bias",
        norms="each head",
        module="modules.moe:GatedAttention",
        rows=(
            *ATTENTION,
            *when("attention_bias", *QKV_BIAS, O_BIAS),
            *HEAD_NORMS,
            Map("self_attn.gate_proj.weight", "attn.gate.kernel", "(N H) D -> D N H"),
        ),
    ),
    Experts(
        "some or all",
        module="deepseek_v3.modules:MoE",
        router="modules.moe:RoundedRouter",
        rows=(
            Map("router.gate.weight", "router.kernel", "E D -> D E"),
            Map("expert_bias", "router.correction", "E", buffer=True),
            *EXPERT_MLPS,
            *SHARED_EXPERT_ROWS,
        ),
    ),
    Factors(embedding="embedding_factor"),
    config=AfmoeConfig,
    least={"first_k_dense_replace": 0},
    derived=SparseConfig.derived | {"n_group", "topk_group", "norm_topk_prob", "mlp_layer_types"},
)


@family_config
class FlintConfig(ChosenExperts, MixedMLPs, PatternConfig):
    """Without `layer_types` the first two layers, the last one and every fourth see all
    tokens; only layers with the window have rotary positions. Without `mlp_only_layers` the first two are dense."""

    rope_fields: ClassVar[Mapping[str, str]] = ROPES_OF_WINDOWS

    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    num_experts: int
    num_experts_per_tok: int
    norm_topk_prob: bool
    decoder_sparse_step: int
    mlp_only_layers: tuple[int, ...] | None

    @property
    def kinds(self) -> tuple[str, ...]:
        if self.layer_types is not None:
            return self.layer_types
        last = self.num_hidden_layers - 1
        full = {i for i in range(last + 1) if i < 2 or i % 4 == 1 or i == last}
        return tuple("full_attention" if i in full else "sliding_attention" for i in range(last + 1))

    @property
    def mlp_kinds(self) -> tuple[str, ...]:
        dense = (0, 1) if self.mlp_only_layers is None else self.mlp_only_layers
        return stepped_mlp_kinds(dense, self.decoder_sparse_step, self.num_hidden_layers)

    @property
    def has_shared_experts(self) -> bool:
        """True if there is an expert that every token uses."""
        return True


FLINT = decoder(
    "flint",
    "Flint",
    "FlintForCausalLM",
    Norms(kind="scaled RMS"),
    Attn("attention_bias", norms="each head", module="modules.moe:SinksOfHeads"),
    Experts("some or all", module="deepseek_v3.modules:MoE", router="modules.moe:PlainScoreRouter"),
    config=FlintConfig,
    table=decoder_table(
        *PRE_NORMS,
        *BIASED_ATTENTION,
        *HEAD_NORMS,
        Map("self_attn.softmax_offset", "attn.sinks", "N"),
        others=mlp_rows(*PROBABLE_EXPERTS, *under("shared_expert", "shared", *SHARED)),
    ),
)
