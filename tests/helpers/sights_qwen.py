"""Kin of the towers of Qwen2.5-VL and GLM-V."""

from dataclasses import replace

from helpers.sights import IMAGE, QWEN_TOKENS, QWEN_VISION, TEXT, Sight, qwen, sight, text_of, wide, without_head_dim

WINDOWS = {"window_size": 16, "fullatt_block_indexes": [1]}


def plain(case: Sight) -> Sight:
    """The case of a model whose rotary positions count tokens."""
    return replace(case, kinds={})


@sight
def exaone4_5() -> Sight:
    from transformers import AutoConfig, AutoModelForMultimodalLM

    text = {**TEXT, "model_type": "exaone4", "hidden_size": 64, "head_dim": 16}
    vision = {**QWEN_VISION, **WINDOWS, "num_heads": 6, "num_key_value_heads": 2}
    config = AutoConfig.for_model(
        "exaone4_5", text_config=text, vision_config=vision, image_token_id=IMAGE, video_token_id=92
    )
    return plain(qwen(AutoModelForMultimodalLM, config))


@sight
def hyperclovax_vision_v2() -> Sight:
    from transformers import AutoConfig, AutoModelForMultimodalLM

    text = {**TEXT, "model_type": "hyperclovax", "embedding_multiplier": 3.0}
    vision = {**QWEN_VISION, **WINDOWS, "model_type": "qwen2_5_vl_vision", "out_hidden_size": 28}
    config = AutoConfig.for_model(
        "hyperclovax_vision_v2", text_config=text, vision_config=vision, image_token_id=IMAGE, video_token_id=92
    )
    return plain(qwen(AutoModelForMultimodalLM, config))


@sight
def glm_ocr() -> Sight:
    from transformers import GlmOcrConfig, GlmOcrForConditionalGeneration

    text = {**without_head_dim(wide(2, 3, 3)), "head_dim": 16}
    return qwen(
        GlmOcrForConditionalGeneration, GlmOcrConfig(text_config=text, vision_config=QWEN_VISION, **QWEN_TOKENS)
    )


@sight
def glm_ocr_without_biases() -> Sight:
    from transformers import GlmOcrConfig, GlmOcrForConditionalGeneration

    vision = {**QWEN_VISION, "attention_bias": False}
    config = GlmOcrConfig(text_config=wide(4, 2, 2), vision_config=vision, **QWEN_TOKENS)
    return qwen(GlmOcrForConditionalGeneration, config)


@sight
def glm5_next() -> Sight:
    from transformers import Glm5NextConfig, Glm5NextForConditionalGeneration

    # few layers: the streams double the last bits of each
    layers = {"layer_types": ["linear_attention", "indexed_attention"], "mlp_layer_types": ["dense", "sparse"]}
    text = {**text_of("glm5_next"), "vocab_size": 97, "num_hidden_layers": 2, **layers}
    vision = {
        **QWEN_VISION,
        "projection_intermediate_size": 20,
        "swiglu_limit": 1.5,
        "out_hidden_size": text["hidden_size"],
    }
    config = Glm5NextConfig(text_config=text, vision_config=vision, image_token_id=IMAGE, video_token_id=92)
    return plain(qwen(Glm5NextForConditionalGeneration, config))


@sight
def cosmos3_omni() -> Sight:
    from transformers import AutoConfig, AutoModelForMultimodalLM

    vision = {**QWEN_VISION, "model_type": "qwen3_vl_vision", "num_position_embeddings": 36}
    vision["deepstack_visual_indexes"] = [0, 2]
    text = {**wide(4, 2, 2), "model_type": "qwen3_vl_text"}
    return qwen(
        AutoModelForMultimodalLM,
        AutoConfig.for_model("cosmos3_omni", text_config=text, vision_config=vision, **QWEN_TOKENS),
    )


@sight
def cohere_compass() -> Sight:
    """Layers without rotary positions, and ones with a window."""
    from transformers import AutoConfig, AutoModelForMultimodalLM

    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
    text = {
        **without_head_dim(TEXT),
        "model_type": "cohere_compass_text",
        "hidden_size": 64,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": 9,
        "rope_parameters": {"sliding_attention": rope, "full_attention": None},
        "logit_scale": 0.5,
    }
    vision = {**QWEN_VISION, "num_position_embeddings": 36, "deepstack_visual_indexes": [0, 2]}
    config = AutoConfig.for_model("cohere_compass", text_config=text, vision_config=vision, **QWEN_TOKENS)
    return qwen(AutoModelForMultimodalLM, config)
