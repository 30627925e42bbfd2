"""ChatGLM, GLM-4 and the models around it."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.gpt import qkv_rows
from tpuconv.models.common.mrope import MropeConfig
from tpuconv.models.common.partial_rope import PartialRopeConfig
from tpuconv.models.common.rope import PLAIN_ROPE, ROPE_KEYS, Rope, refuse_ropes
from tpuconv.models.common.rows import MTP_COPIES, MTP_HEAD, MTP_IGNORE
from tpuconv.models.common.sparse import FurtherLayers, SparseConfig
from tpuconv.models.common.wrapper import SEES, inside
from tpuconv.models.declare import decoder, wrapper
from tpuconv.models.deepseek_v3.family import EXPERT_ROWS
from tpuconv.models.parts import Attn, Experts, Mlp, Mtp, Norms
from tpuconv.models.towers.qwen_vit.modalities import GLM_OCR_VISION, GLM_VISION
from tpuconv.notation.table import Map, under

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


@family_config
class ChatGlmConfig(PartialRopeConfig):
    """`rope_ratio` is the factor of the base of rotary positions (`modeling_chatglm.py` of zai-org/glm-4-9b-chat)."""

    multi_query_attention: bool = False
    rope_ratio: float = 1.0

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.rope_ratio <= 0:
            yield f"rope_ratio={self.rope_ratio} is not positive"
        if not (self.multi_query_attention or self.num_key_value_heads is None):
            yield f"multi_query_group_num={self.num_key_value_heads}, and multi_query_attention is false"

    @classmethod
    def read_ropes(cls, raw: Mapping[str, Any], context: int) -> dict[str, Any]:
        refuse_ropes(cls.model_type, raw, ROPE_KEYS[:-1], "rope_ratio alone says the rotary positions of this family")
        ratio = raw.get("rope_ratio", 1.0)
        return {"rope": Rope(theta=PLAIN_ROPE.theta * ratio)}


CHATGLM_NAMES = {
    "model.embed_tokens": "transformer.embedding.word_embeddings",
    "model.norm": "transformer.encoder.final_layernorm",
    "lm_head": "transformer.output_layer",
    "model.layers.{L}": "transformer.encoder.layers.{L}",
    "model.layers.{L}.self_attn": "transformer.encoder.layers.{L}.self_attention",
    "model.layers.{L}.self_attn.o_proj": "transformer.encoder.layers.{L}.self_attention.dense",
    "model.layers.{L}.mlp.gate_up_proj": "transformer.encoder.layers.{L}.mlp.dense_h_to_4h",
    "model.layers.{L}.mlp.down_proj": "transformer.encoder.layers.{L}.mlp.dense_4h_to_h",
}

CHATGLM = GLM.but(
    "chatglm",
    "ChatGLM 2 and 3, GLM-4-9B of 2024 with code of its own",
    "ChatGLMForConditionalGeneration",
    "ChatGLMForCausalLM",
    "ChatGLMModel",  # which has a head in releases
    Attn(
        "attention_bias",
        out_bias=False,
        rope="pairs",
        rows=(
            *qkv_rows("self_attn.query_key_value", bias="attention_bias"),
            Map("self_attn.o_proj.weight", "attn.o.kernel", "D (N H) -> N H D"),
        ),
    ),
    config=ChatGlmConfig,
    names=CHATGLM_NAMES,
    # As `configuration_chatglm.py` of the release has them.
    defaults={
        **{"vocab_size": 65024, "hidden_size": 4096, "intermediate_size": 13696, "num_hidden_layers": 28},
        **{"num_attention_heads": 32, "head_dim": 128, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
        **{"partial_rotary_factor": 0.5, "tie_word_embeddings": False, "attention_bias": False},
    },
    aliases={
        "multi_query_group_num": "num_key_value_heads",
        **{
            "num_layers": "num_hidden_layers",
            "padded_vocab_size": "vocab_size",
            "ffn_hidden_size": "intermediate_size",
        },
        **{"kv_channels": "head_dim", "seq_length": "max_position_embeddings", "layernorm_epsilon": "rms_norm_eps"},
        "add_qkv_bias": "attention_bias",
    },
    only={
        **{"rmsnorm": (True,), "post_layer_norm": (True,), "original_rope": (True,), "add_bias_linear": (False,)},
        **{"apply_residual_connection_post_layernorm": (False,), "quantization_bit": (0,), "pre_seq_len": (None,)},
        "interleaved_qkv": (False,),
    },
    left_out=frozenset(
        {
            *("apply_query_key_layer_scaling", "attention_softmax_in_fp32", "bias_dropout_fusion"),
            *("fp32_residual_connection", "prefix_projection"),
        }
    ),
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

GLM4_LAYER = tuple(row for part in GLM4.parts for row in part.table_rows)
GLM_OCR = wrapper(
    "glm_ocr",
    "GLM-OCR",
    "GlmOcrForConditionalGeneration",
    Mtp(),
    text=GLM4,
    mixins=(FurtherLayers, MropeConfig),
    table=inside(
        replace(
            GLM4.table,
            rows=(*GLM4.table, *under("model.layers.{U}", "mtp.{U}", *GLM4_LAYER, *MTP_HEAD)),
            ignore={**GLM4.table.ignore, **MTP_IGNORE},
            copies={**GLM4.table.copies, **MTP_COPIES},
        ),
        "model.language_model.",
        {"visual": SEES},
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
