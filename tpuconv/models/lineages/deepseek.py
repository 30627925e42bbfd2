"""Models after DeepSeek V2 and V3: latent attention, and experts or none."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self

from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.rope import PARAMETER_KEYS
from tpuconv.models.common.rows import (
    BIASED_ATTENTION,
    EXPERT_MLPS,
    MLP,
    MTP_COPIES,
    MTP_HEAD,
    MTP_IGNORE,
    PRE_NORMS,
    SHARED_EXPERT_ROWS,
    decoder_table,
    mlp_rows,
    when,
)
from tpuconv.models.common.sparse import SparseConfig
from tpuconv.models.common.wrapper import BRINGS, SEES, WrapperConfig, inside
from tpuconv.models.declare import decoder, like, wrapper
from tpuconv.models.deepseek_v3 import family as deepseek_v3
from tpuconv.models.lineages.llama import MiniCpmFactors
from tpuconv.models.parts import Attn, Experts, Factors, Mlp, Mtp, Norms
from tpuconv.models.towers.deepseek_ocr.family import DEEPSEEK_OCR2_VISION, DEEPSEEK_OCR_VISION
from tpuconv.models.towers.deepseek_ocr.released import FIRST_TYPE, RELEASED_TYPE, with_text_config
from tpuconv.models.towers.moonvit.family import KIMI_VISION, KIMI_VL_VISION
from tpuconv.notation.table import Map, under

DEEPSEEK_V3 = deepseek_v3.FAMILY

KIMI_K2 = like(
    DEEPSEEK_V3,
    "kimi_k2",
    "Kimi K2",
    "DeepseekV3ForCausalLM",
    only={**deepseek_v3.Config.only, "num_nextn_predict_layers": (0,)},
    defaults={"num_nextn_predict_layers": 0},
)

KIMI_K25 = wrapper(
    "kimi_k25",
    "Kimi K2.5",
    "KimiK25ForConditionalGeneration",
    "Kimi_K25ForConditionalGeneration",
    text=KIMI_K2,
    prefix="language_model.model.",
    text_types=("kimi_k2", "deepseek_v3"),
    tied=True,
    modalities=(KIMI_VISION,),
)


KIMI_VL = wrapper(
    "kimi_vl",
    "Kimi-VL A3B",
    "KimiVLForConditionalGeneration",
    text=DEEPSEEK_V3,
    prefix="language_model.model.",
    defaults={"num_nextn_predict_layers": 0},
    modalities=(KIMI_VL_VISION,),
)


@family_config
class LiteConfig(deepseek_v3.Config):
    """`mlp_layer_types` says which layers have experts; in files without it the first
    `first_k_dense_replace` have none."""

    mlp_layer_types: tuple[str, ...] | None

    @classmethod
    def in_our_keys(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        out, kinds = super().in_our_keys(raw), raw.get("mlp_layer_types")
        if isinstance(kinds, list):
            out.setdefault("first_k_dense_replace", [*kinds, "sparse"].index("sparse"))
        return out

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.head_dim not in (None, self.qk_rope_head_dim):  # transformers reads it as `qk_rope_head_dim`
            yield f"head_dim={self.head_dim} is not qk_rope_head_dim={self.qk_rope_head_dim}"
        kinds, dense = self.mlp_layer_types, self.first_k_dense_replace
        if kinds is not None and kinds != ("dense",) * dense + ("sparse",) * (self.num_hidden_layers - dense):
            yield (
                f"mlp_layer_types is not 'dense' for first_k_dense_replace={dense} layers, then 'sparse', for "
                f"{self.num_hidden_layers} layers"
            )


GLM4_MOE_LITE = like(
    DEEPSEEK_V3,
    "glm4_moe_lite",
    "GLM-4.7-Flash",
    "Glm4MoeLiteForCausalLM",
    mixins=(LiteConfig,),
    defaults={"first_k_dense_replace": 1, "head_dim": None},
)


@family_config
class SarvamConfig(deepseek_v3.Config):
    """`deepseek_yarn` is another name of YaRN. `q_head_dim` follows from other keys."""

    left_out: ClassVar[frozenset[str]] = frozenset({"q_head_dim"})

    @classmethod
    def in_our_keys(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        out = super().in_our_keys(raw)
        for key in {*PARAMETER_KEYS} & out.keys():
            if isinstance(given := out[key], Mapping):
                out[key] = {name: "yarn" if value == "deepseek_yarn" else value for name, value in given.items()}
        return out


SARVAM_MLA = like(
    DEEPSEEK_V3,
    "sarvam_mla",
    "Sarvam 105B",
    "SarvamMLAForCausalLM",
    "DeepseekV3ForCausalLM",
    mixins=(SarvamConfig,),
    aliases={"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"},
    defaults={"num_nextn_predict_layers": 0, "head_dim": None},
)

LATENT_PART = Attn(module="deepseek_v3.modules:Attention", rows=deepseek_v3.ATTENTION_ROWS)
"""Its rows include the norms of a layer."""
LATENT_DECODER = "modules.deepseek:LatentDecoder"


@family_config
class V2Config(deepseek_v3.Config):
    """The weights of experts are never normalized, whatever `norm_topk_prob`."""

    topk_method: str

    @property
    def groups(self) -> tuple[int, int]:
        return (self.n_group, self.topk_group) if self.topk_method == "group_limited_greedy" else (1, 1)


UNCORRECTED_EXPERTS = tuple(row for row in deepseek_v3.EXPERT_ROWS if not row.buffer)

DEEPSEEK_V2 = decoder(
    "deepseek_v2",
    "DeepSeek V2, V2-Lite, V2.5, Coder V2",
    "DeepseekV2ForCausalLM",
    Norms(rows=()),
    Attn(module="modules.deepseek:NeighbourAttention", rows=deepseek_v3.ATTENTION_ROWS),
    Experts("some", module="deepseek_v3.modules:MoE", router="modules.deepseek:Router", rows=UNCORRECTED_EXPERTS),
    base=LATENT_DECODER,
    config=V2Config,
    defaults={"head_dim": None, "num_nextn_predict_layers": 0, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 6},
    only={
        "scoring_func": ("softmax",),
        "topk_method": ("greedy", "group_limited_greedy"),
        "moe_layer_freq": (1,),
        "norm_topk_prob": (False,),
        "num_nextn_predict_layers": (0,),
        "rope_interleave": (True,),
        "mlp_bias": (False,),
    },
    nullable=frozenset({"n_group", "topk_group", "topk_method", "norm_topk_prob"}),
)

EXPERT_FIELDS = {
    *(
        "moe_intermediate_size",
        "n_routed_experts",
        "n_shared_experts",
        "routed_scaling_factor",
        "n_group",
        "topk_group",
    ),
    *("num_experts_per_tok", "first_k_dense_replace", "norm_topk_prob", "num_nextn_predict_layers"),
}
"""The fields of DeepSeek V3's experts, which there are none of."""


@family_config
class YoutuConfig(deepseek_v3.Config):
    """All layers are dense. `embedding_initializer_range` is of training."""

    embedding_initializer_range: float | None

    @property
    def layer_sets(self) -> dict[str, Sequence[int]]:
        return {**super().layer_sets, "I": tuple(range(self.num_hidden_layers)), "J": ()}


YOUTU = decoder(
    "youtu",
    "Youtu-LLM 2B",
    "YoutuForCausalLM",
    Norms(rows=()),
    LATENT_PART,
    Mlp(),
    base=LATENT_DECODER,
    config=YoutuConfig,
    only={},
    derived=deepseek_v3.Config.derived | EXPERT_FIELDS,
)


@family_config
class MiniCpm3Config(MiniCpmFactors, YoutuConfig):
    """A factor that is null is 1."""

    v_head_dim: int | None  # type: ignore[assignment]  # Youtu's is never absent

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.v_head_dim is None and self.hidden_size % self.num_attention_heads:
            yield f"hidden_size={self.hidden_size} is not a multiple of num_attention_heads={self.num_attention_heads}"

    @property
    def sizes(self) -> dict[str, int]:
        return {**super().sizes, "H": self.v_head_dim or self.hidden_size // self.num_attention_heads}


MINICPM3 = YOUTU.but(
    "minicpm3",
    "MiniCPM 3 4B",
    "MiniCPM3ForCausalLM",
    Factors(embedding="scale_emb", residual="residual_factor", logits="logit_factor"),
    config=MiniCpm3Config,
    defaults={"head_dim": None, "rope_interleave": False, "embedding_initializer_range": None},
    only={"mlp_bias": (False,), "rope_interleave": (False,)},
    derived=YOUTU.config.derived | {"embedding_initializer_range"},
)

CORRECTED = "is_corrected"
"""The field that says whether routers have corrections, which the names of the tensors tell."""


@family_config
class AxK1Config(deepseek_v3.Config):
    """Without `mlp_layer_types` the first `first_k_dense_replace` layers are dense. The
    release has no corrections of routers; what transformers saves has them."""

    n_shared_experts: int
    q_lora_rank: int
    mlp_layer_types: tuple[str, ...] | None
    is_corrected: bool = True

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        return replace(super().from_hf(raw), is_corrected=bool(raw.get(CORRECTED, True)))

    @classmethod
    def settled(cls, raw: Mapping[str, Any], tensors: Collection[str]) -> Mapping[str, Any]:
        """Returns a parsed config.json that says whether routers have corrections."""
        return {**raw, CORRECTED: any(name.endswith(("_correction_bias", "router.correction")) for name in tensors)}


AXK1 = decoder(
    "axk1",
    "A.X K1",
    "AXK1ForCausalLM",
    Norms(module="modules.deepseek:NormedExpertsBlock"),
    LATENT_PART,
    Experts("some", module="deepseek_v3.modules:MoE", router="modules.deepseek:MaybeCorrectedRouter"),
    base=LATENT_DECODER,
    config=AxK1Config,
    defaults={"num_nextn_predict_layers": 0, "first_k_dense_replace": 1},
    derived=deepseek_v3.Config.derived | {CORRECTED},
    table=decoder_table(
        *deepseek_v3.ATTENTION_ROWS,
        others=(
            *under("model.layers.{I}.mlp", "layers.{I}.mlp", *MLP),
            *under(
                "model.layers.{J}.mlp",
                "layers.{J}.moe",
                Map("gate.weight", "router.kernel", "E D -> D E"),
                Map("gate.e_score_correction_bias", "router.correction", "E", when=CORRECTED, buffer=True),
                *EXPERT_MLPS,
                *when("has_shared_experts", *SHARED_EXPERT_ROWS),
            ),
            Map("model.layers.{J}.post_mlp_layernorm.weight", "layers.{J}.post_mlp_norm.scale", "D"),
        ),
        ignore={"model.layers.{I}.post_mlp_layernorm.weight": "dense layers do not use it", **MTP_IGNORE},
    ),
)

DEEPSEEK = decoder(
    "deepseek",
    "DeepSeekMoE 16B",
    "DeepseekForCausalLM",
    Norms(),
    Attn("attention_bias"),
    Experts(
        "some or all",
        module="deepseek_v3.modules:MoE",
        rows=UNCORRECTED_EXPERTS,
        router="modules.deepseek:Router",
    ),
    config=SparseConfig,
    only={"scoring_func": ("softmax",), "norm_topk_prob": (False,), "moe_layer_freq": (1,), "mlp_bias": (False,)},
    least={"n_shared_experts": 0, "first_k_dense_replace": 0},
    # As `configuration_deepseek.py` of deepseek-ai/deepseek-moe-16b-base has them; the numbers of experts, which it has
    # not, from config.json there.
    defaults={
        **{"n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6},
        **{"vocab_size": 102400, "hidden_size": 4096, "intermediate_size": 11008, "moe_intermediate_size": 1407},
        **{"num_hidden_layers": 30, "num_attention_heads": 32, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6},
        **{"tie_word_embeddings": False, "attention_bias": False, "routed_scaling_factor": 1.0},
        **{"first_k_dense_replace": 0, "norm_topk_prob": False},
    },
)


@family_config
class Ocr2Config(WrapperConfig, SparseConfig):
    """The weights of experts are never normalized."""

    topk_method: str

    @classmethod
    def around_text(cls, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        return with_text_config(raw)

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.head_dim not in (None, self.hidden_size // self.num_attention_heads):
            yield f"head_dim={self.head_dim} is not hidden_size by num_attention_heads"

    @property
    def groups(self) -> tuple[int, int]:
        return (self.n_group, self.topk_group) if self.topk_method == "group_limited_greedy" else (1, 1)


DEEPSEEK_OCR2 = decoder(
    "deepseek_ocr2",
    "DeepSeek-OCR, DeepSeek-OCR 2",
    "DeepseekOcr2ForConditionalGeneration",
    Norms(),
    Attn("attention_bias"),
    Experts("some or all", module="deepseek_v3.modules:MoE", router="modules.deepseek:Router"),
    config=Ocr2Config,
    types={"DeepseekOCR2ForCausalLM": RELEASED_TYPE, "DeepseekOCRForCausalLM": FIRST_TYPE},
    defaults={"num_experts_per_tok": 6, "n_group": 1, "topk_group": 1},
    only={"topk_method": ("greedy", "group_limited_greedy"), "mlp_bias": (False,)},
    least={"n_shared_experts": 0, "first_k_dense_replace": 0},
    nullable=frozenset({"n_group", "topk_group", "topk_method"}),
    derived=SparseConfig.derived | {"first_k_dense_replace", "norm_topk_prob"},
    table=inside(
        decoder_table(*PRE_NORMS, *BIASED_ATTENTION, others=mlp_rows(*UNCORRECTED_EXPERTS)),
        "model.",
        {
            **dict.fromkeys(("sam_model", "qwen2_model", "vision_model", "vision_tower"), SEES),
            **dict.fromkeys(("projector", "multi_modal_projector"), BRINGS),
        },
        tensors=dict.fromkeys(("image_newline", "view_seperator", "view_separator"), BRINGS),
    ),
    modalities=(DEEPSEEK_OCR2_VISION, DEEPSEEK_OCR_VISION),
)


@family_config
class PanguUltraConfig(deepseek_v3.Config):
    """DeepSeek V3 between norms. Routers have corrections in some releases."""

    router_enable_expert_bias: bool = False
    sandwich_norm: bool = True

    @property
    def is_corrected(self) -> bool:
        """True if routers have corrections."""
        return self.router_enable_expert_bias


PANGU_LAYER = (
    *deepseek_v3.ATTENTION_ROWS[:-1],
    Map("post_attention_layernorm.weight", "post_attn_norm.scale", "D"),
    Map("pre_mlp_layernorm.weight", "mlp_norm.scale", "D"),
    Map("post_mlp_layernorm.weight", "post_mlp_norm.scale", "D"),
)
PANGU_EXPERTS = (
    Map("gate.weight", "router.kernel", "E D -> D E"),
    Map("e_score_correction_bias", "router.correction", "E", when="is_corrected", buffer=True),
    *EXPERT_MLPS,
    *when("has_shared_experts", *SHARED_EXPERT_ROWS),
)

PANGU_ULTRA_MOE = decoder(
    "pangu_ultra_moe",
    "openPangu Ultra MoE 718B",
    "PanguUltraMoEForCausalLM",
    Norms("sandwich"),
    LATENT_PART,
    Experts("some", module="deepseek_v3.modules:MoE", router="modules.deepseek:MaybeCorrectedRouter"),
    Mtp(),
    base=LATENT_DECODER,
    config=PanguUltraConfig,
    only={"sandwich_norm": (True,), "attention_bias": (False,), "rope_interleave": (True,), "mlp_bias": (False,)},
    aliases={
        **{"num_routed_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"},
        **{"num_dense_layers": "first_k_dense_replace", "num_mtp_layers": "num_nextn_predict_layers"},
        **{"attention_kv_lora_dim": "kv_lora_rank", "attention_q_lora_dim": "q_lora_rank"},
        **{"attention_qk_dim": "qk_nope_head_dim", "attention_qk_rope_dim": "qk_rope_head_dim"},
        "attention_v_dim": "v_head_dim",
    },
    # The sizes of openPangu-Ultra-MoE-718B.
    defaults={
        **{"vocab_size": 153600, "hidden_size": 7680, "intermediate_size": 18432, "moe_intermediate_size": 2048},
        **{"num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "head_dim": None},
        **{"max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "num_nextn_predict_layers": 1},
        **{"n_group": 1, "topk_group": 1},
    },
    default_rope={"rope_theta": 25600000.0},
    table=decoder_table(
        *PANGU_LAYER,
        others=(
            *under("model.layers.{I}.mlp", "layers.{I}.mlp", *MLP),
            *under("model.layers.{J}.mlp", "layers.{J}.moe", *PANGU_EXPERTS),
            *under("model.layers.{U}", "mtp.{U}", *PANGU_LAYER, *under("mlp", "moe", *PANGU_EXPERTS), *MTP_HEAD),
        ),
        ignore=MTP_IGNORE,
        copies=MTP_COPIES,
    ),
)
