"""GLM-4 and the models around it."""

from dataclasses import replace
from typing import Any

from tpuconv.models.common.mrope import MropeConfig
from tpuconv.models.common.partial_rope import PartialRopeConfig
from tpuconv.models.common.rows import MTP_HEAD, MTP_IGNORE
from tpuconv.models.common.sparse import FurtherLayers, SparseConfig
from tpuconv.models.common.wrapper import SEES, inside
from tpuconv.models.declare import decoder, wrapper
from tpuconv.models.deepseek_v3.family import EXPERT_ROWS
from tpuconv.models.parts import Attn, Experts, Mlp, Mtp, Norms
from tpuconv.models.towers.modalities import GLM_OCR_VISION, GLM_VISION

GLM = decoder(
    "glm",
    "GLM-4 of 2024",
    "GlmForCausalLM",
    Norms(),
    Attn("attention_bias", out_bias=False, rope="pairs"),
    Mlp("fused"),
    config=PartialRopeConfig,
    defaults={"partial_rotary_factor": 0.5},
)

GLM4 = GLM.but(
    "glm4",
    "GLM-4-0414, GLM-Z1",
    "Glm4ForCausalLM",
    Norms(
        "sandwich",
        names=("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
    ),
)

GLM4V = wrapper(
    "glm4v",
    "GLM-4.1V-9B",
    "Glm4vForConditionalGeneration",
    text=GLM4,
    mixins=(MropeConfig,),
    only={"attention_bias": (True,)},
    defaults={"head_dim": None, "partial_rotary_factor": 1.0},
    default_sections=(8, 12, 12),
    modalities=(GLM_VISION,),
)

_AS_GLM46V: dict[str, Any] = {
    "text": GLM4,
    "mixins": (MropeConfig,),
    "text_types": ("glm4v_text",),
    "only": {"attention_bias": (True,)},
    "defaults": {
        **{"head_dim": None, "partial_rotary_factor": 1.0},
        **{"max_position_embeddings": 32768, "rms_norm_eps": 1e-5},
    },
    "default_sections": (8, 12, 12),
    "modalities": (GLM_VISION,),
}

GLM46V = wrapper("glm46v", "GLM-4.6V-Flash", "Glm46VForConditionalGeneration", **_AS_GLM46V)

GLMGA = wrapper("glmga", "GLM-GA", "Glm46VForConditionalGeneration", "GlmgaForConditionalGeneration", **_AS_GLM46V)

GLM_OCR = wrapper(
    "glm_ocr",
    "GLM-OCR",
    "GlmOcrForConditionalGeneration",
    text=GLM4,
    mixins=(FurtherLayers, MropeConfig),
    table=inside(
        replace(GLM4.table, ignore={**GLM4.table.ignore, **MTP_IGNORE}), "model.language_model.", {"visual": SEES}
    ),
    only={"attention_bias": (False,)},
    least={"num_nextn_predict_layers": 0},
    keys={"num_nextn_predict_layers": int},
    defaults={
        **{"head_dim": None, "partial_rotary_factor": 1.0, "attention_bias": False},
        "num_nextn_predict_layers": 1,
    },
    default_sections=(8, 12, 12),
    modalities=(GLM_OCR_VISION,),
)

GLM4_MOE = decoder(
    "glm4_moe",
    "GLM-4.5, GLM-4.5-Air, GLM-4.6, GLM-4.7",
    "Glm4MoeForCausalLM",
    Norms(),
    Attn("attention_bias", out_bias=False, norms="each head", normed="use_qk_norm"),
    Experts("some", module="deepseek_v3.modules:MoE", rows=EXPERT_ROWS),
    Mtp(rows=MTP_HEAD),
    config=(FurtherLayers, SparseConfig, PartialRopeConfig),
    keys={"num_nextn_predict_layers": int},
    # All files have `head_dim`, which does not follow from the width.
    defaults={"num_nextn_predict_layers": 1, "head_dim": 128, "partial_rotary_factor": 0.5},
    least={"first_k_dense_replace": 0, "num_nextn_predict_layers": 0, "n_shared_experts": 0},
    derived=SparseConfig.derived | {"mlp_layer_types"},
)

GLM4V_MOE = wrapper(
    "glm4v_moe",
    "GLM-4.5V, GLM-4.6V",
    "Glm4vMoeForConditionalGeneration",
    text=GLM4_MOE,
    mixins=(MropeConfig,),
    only={"use_qk_norm": (False,)},
    defaults={"num_nextn_predict_layers": 0},
    default_sections=(8, 12, 12),
    modalities=(GLM_VISION,),
)
