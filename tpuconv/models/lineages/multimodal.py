"""Multimodal models around the text model of a family with modules of its own."""

from typing import ClassVar

from tpuconv.models.common.mrope import MropeConfig
from tpuconv.models.common.rows import CORRECTION_BESIDE, MLP, NUMBERED_EXPERT_MLPS, SHARED_EXPERT_ROWS
from tpuconv.models.common.wrapper import BRINGS, HEARS, SEES, inside
from tpuconv.models.declare import wrapper
from tpuconv.models.dots3_note_text.family import FAMILY as DOTS3_NOTE_TEXT
from tpuconv.models.hy_v4.family import FAMILY as HY_V4
from tpuconv.models.inkling2_loop_text.family import FAMILY as INKLING2_LOOP_TEXT
from tpuconv.models.inkling2_text.family import FAMILY as INKLING2_TEXT
from tpuconv.models.inkling_text.family import FAMILY as INKLING_TEXT
from tpuconv.models.inkling_text.family import RELEASED_TABLE, W13_EXPERTS, W13_MLPS, W13_SHARED
from tpuconv.models.llama4_text.family import FAMILY as LLAMA4_TEXT
from tpuconv.models.mimo_v2_flash.family import FAMILY as MIMO_V2_FLASH
from tpuconv.models.mimo_v2_flash.family import FULL_QKV, MTP_LAYERS, V2_TABLE, WINDOW_QKV, AnyHeads
from tpuconv.models.minimax_m3_vl_text.family import FAMILY as MINIMAX_M3_VL_TEXT
from tpuconv.models.minimax_m3_vl_text.family import m3_table
from tpuconv.models.mllama_text_model.family import FAMILY as MLLAMA_TEXT_MODEL
from tpuconv.models.qwen3_next.qwen3_5 import OUTSIDE, QWEN3_5_MOE_TEXT, QWEN3_5_TEXT
from tpuconv.models.qwen4_exp_text.family import FAMILY as QWEN4_EXP_TEXT
from tpuconv.models.step3p5.family import FAMILY as STEP3P5
from tpuconv.models.towers.inkling.family import INKLING2_VISION, INKLING_AUDIO, INKLING_VISION
from tpuconv.models.towers.llama4.family import LLAMA4_VISION
from tpuconv.models.towers.mimo.family import MIMO_AUDIO, MIMO_VISION
from tpuconv.models.towers.mllama.family import MLLAMA_VISION
from tpuconv.models.towers.packed_vit.family import HY4_VISION, MINIMAX_VISION
from tpuconv.models.towers.qwen_vit.modalities import QWEN35_VISION
from tpuconv.models.towers.step_vit.family import STEP_VISION

LLAMA4 = wrapper(
    "llama4",
    "Llama 4 Scout and Maverick",
    "Llama4ForConditionalGeneration",
    text=LLAMA4_TEXT,
    prefix="language_model.model.",
    modalities=(LLAMA4_VISION,),
)

MLLAMA = wrapper(
    "mllama",
    "Llama 3.2 Vision 11B, 90B",
    "MllamaForConditionalGeneration",
    text=MLLAMA_TEXT_MODEL,
    prefix="language_model.model.",
    modalities=(MLLAMA_VISION,),
)

QWEN3_5 = wrapper(
    "qwen3_5",
    "Qwen3.5, dense",
    "Qwen3_5ForConditionalGeneration",
    text=QWEN3_5_TEXT,
    outside=OUTSIDE,
    modalities=(QWEN35_VISION,),
)

QWEN3_5_MOE = wrapper(
    "qwen3_5_moe",
    "Qwen3.5 with experts",
    "Qwen3_5MoeForConditionalGeneration",
    text=QWEN3_5_MOE_TEXT,
    outside=OUTSIDE,
    modalities=(QWEN35_VISION,),
)

FORECASTS = "encoder of time series and their forecast: the text model alone is converted"

INTERN_S2_PREVIEW = wrapper(
    "intern_s2_preview",
    "Intern-S2-Preview",
    "InternS2PreviewForConditionalGeneration",
    text=QWEN3_5_MOE_TEXT,
    outside={**OUTSIDE, "time_series": FORECASTS, "time_series_forecaster": FORECASTS},
    outside_keys=frozenset({"ts_config", "ts_start_id", "ts_end_id"}),
    modalities=(QWEN35_VISION,),
)

QWEN4_EXP = wrapper(
    "qwen4_exp",
    "Qwen4-Exp, such as Qwen3.8-Flash-Next",
    "Qwen4ExpForConditionalGeneration",
    text=QWEN4_EXP_TEXT,
    outside=OUTSIDE,
    defaults={
        **{"indexer_n_heads": 4, "indexer_head_dim": 256, "indexer_budget": 2048},
        "indexer_compress_ratio": 4,
    },
    modalities=(QWEN35_VISION,),
)


class HyV4VlConfig(MropeConfig):
    """Rotary positions turn adjacent pairs, in sections. Norms of latent vectors have the epsilon of the others."""

    interleaved: ClassVar[bool] = True
    default_sections: ClassVar[tuple[int, ...]] = (12, 10, 10)
    rms_norm_eps: float

    @property
    def latent_eps(self) -> float:
        """See `tpuconv.models.hy_v4.family.Config`."""
        return self.rms_norm_eps


HEAD_OF_STREAMS = "model.hc_pre.hc_head.hc_head_"
"""How the names of the weights begin that join the residual streams."""

HY_V4_VL = wrapper(
    "hy_v4_vl",
    "Hy4-VL",
    "HYV4VLForConditionalGeneration",
    text=HY_V4,
    mixins=(HyV4VlConfig,),
    prefix="model.",
    outside={"vit": SEES, "vision_tower": SEES},
    # transformers puts these parts of names in another order.
    modules={
        f"{front}{name}": f"{HEAD_OF_STREAMS}{name}"
        for front in ("model.language_model.hc_head.hc_", "model.hc_head.hc_pre.hc_head_")
        for name in ("fn", "base", "scale")
    },
    only={**HY_V4.config.only, "rope_interleave": (True,)},
    defaults={"head_dim": None, "num_key_value_heads": None, "rope_interleave": True},
    modalities=(HY4_VISION,),
)

MIMO_V2 = wrapper(
    "mimo_v2",
    "MiMo V2.5, V2.5-Pro, V2.6-Flash, V2.6-Pro",
    "MiMoV2ForCausalLM",
    text=MIMO_V2_FLASH,
    mixins=(AnyHeads,),
    table=inside(
        V2_TABLE, "model.", {"visual": SEES, "audio_encoder": HEARS, "speech_embeddings": HEARS}, head="lm_head."
    ),
    flat=True,
    left_out=MIMO_V2_FLASH.config.left_out - {"swa_num_key_value_heads"},
    keys={"swa_num_key_value_heads": int | None, "attention_projection_layout": str | None},
    defaults={"swa_num_key_value_heads": None, "attention_projection_layout": None},
    only={
        **MIMO_V2_FLASH.config.only,
        "attention_bias": (False,),
        "attention_projection_layout": ("fused_qkv", "split", None),
        "num_nextn_predict_layers": (0, MTP_LAYERS),
    },
    forms=(WINDOW_QKV, FULL_QKV),
    modalities=(MIMO_VISION, MIMO_AUDIO),
)

STEP3P7 = wrapper(
    "step3p7",
    "Step-3.7-Flash",
    "Step3p7ForConditionalGeneration",
    text=STEP3P5,
    prefix="model.",
    modalities=(STEP_VISION,),
)

DOTS3_NOTE = wrapper(
    "dots3_note",
    "dots3.note, text",
    "Dots3NoteForConditionalGeneration",
    "Dots3NoteForCausalLM",
    text=DOTS3_NOTE_TEXT,
    prefix="model.",
    outside={"vision_encoder": SEES, "audio_encoder": HEARS, "audio_adapter": HEARS},
    flat=True,
    defaults={"sliding_window": 512},
)

MINIMAX_M3_VL = wrapper(
    "minimax_m3_vl",
    "MiniMax-M3",
    "MiniMaxM3SparseForConditionalGeneration",
    text=MINIMAX_M3_VL_TEXT,
    table=inside(
        m3_table("index_", MLP, "block_sparse_moe", (*CORRECTION_BESIDE, *NUMBERED_EXPERT_MLPS, *SHARED_EXPERT_ROWS)),
        "language_model.model.",
        {"vision_tower": SEES, "multi_modal_projector": BRINGS, "patch_merge_mlp": BRINGS},
    ),
    modalities=(MINIMAX_VISION,),
)

INKLING_MM_MODEL = wrapper(
    "inkling_mm_model",
    "Inkling",
    "InklingForConditionalGeneration",
    text=INKLING_TEXT,
    table=inside(
        RELEASED_TABLE,
        "model.",
        {"visual": SEES, "vision_tower": SEES, "audio": HEARS, "audio_tower": HEARS},
    ),
    outside_keys=frozenset({"mtp_config"}),
    forms=(W13_EXPERTS, W13_SHARED, W13_MLPS),
    modalities=(INKLING_VISION, INKLING_AUDIO),
)

INKLING2 = wrapper(
    "inkling2",
    "Inkling 2",
    "Inkling2ForConditionalGeneration",
    text=INKLING2_TEXT,
    prefix="model.",
    outside={"visual": SEES, "vision_tower": SEES},
    forms=INKLING2_TEXT.forms,
    modules=INKLING2_TEXT.aliases,
    modalities=(INKLING2_VISION,),
)

INKLING2_LOOP = wrapper(
    "inkling2_loop",
    "Inkling 2 Mini",
    "Inkling2LoopForConditionalGeneration",
    text=INKLING2_LOOP_TEXT,
    prefix="model.",
    outside={"visual": SEES, "vision_tower": SEES},
    forms=INKLING2_LOOP_TEXT.forms,
    modules=INKLING2_LOOP_TEXT.aliases,
    modalities=(INKLING2_VISION,),
)
