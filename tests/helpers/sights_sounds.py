"""Tiny models that hear, and models that see with encoders of Gemma 4, Llama 4 and Kimi."""

from dataclasses import replace
from typing import Any

import numpy as np

from helpers.sights import (
    END,
    GRIDS,
    IMAGE,
    LINEAR,
    QWEN_TOKENS,
    QWEN_VISION,
    SOUND,
    START,
    TEXT,
    Sight,
    noise,
    partial,
    qwen,
    sight,
    tiny,
    wide,
    without_head_dim,
)

GEMMA4_TOKENS = {
    "image_token_id": IMAGE,
    "audio_token_id": SOUND,
    "video_token_id": 92,
    "boi_token_id": START,
    "eoi_token_id": END,
    "boa_token_id": 91,
}


def limited(model: Any) -> Any:
    """The model with limits of inputs and outputs that cut some values, and with other statistics."""
    import torch

    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith(("_min", "_max")):
                buffer.fill_((1.25 if "input" in name else 1.5) * (1 if name.endswith("max") else -1))
            if "std_" in name:
                buffer.copy_(torch.randn_like(buffer))
    return model


def placed(*sizes: tuple[int, int], patches: int) -> np.ndarray:
    """Column and row of the patches of images, -1 for padding."""
    out = np.full((len(sizes), patches, 2), -1)
    for image, (h, w) in enumerate(sizes):
        place = np.arange(h * w)
        out[image, : h * w] = np.stack([place % w, place // w], axis=1)
    return out


def gemma4_text(**changes: Any) -> dict[str, Any]:
    return {
        **TEXT,
        "num_hidden_layers": 4,
        "global_head_dim": 16,
        "num_global_key_value_heads": 1,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "vocab_size_per_layer_input": 97,
        "num_kv_shared_layers": 0,
        **changes,
    }


GEMMA4_IMAGES = {
    "pixel_values": np.random.default_rng(4).random((3, 24, 48)).astype(np.float32),
    "image_position_ids": placed((4, 6), (6, 2), (2, 4), patches=24),
}
GEMMA4_ROUNDING = 2e-5
"""One rounding of each number of the images and sounds moves transformers' own logits by 1.3e-5, with sounds by 5.5e-5
of the largest: limits and statistics at random are that sensitive."""
GEMMA4_KINDS = {"mm_token_type_ids": {IMAGE: 1, SOUND: 3}}


GEMMA4_VIT = {
    "hidden_size": 40,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "patch_size": 4,
    "pooling_kernel_size": 2,
    "position_embedding_size": 16,
    "standardize": True,
}


def with_gemma4_images(model: Any, **facts: Any) -> Sight:
    first, second, third = ([START, *[IMAGE] * tokens, END] for tokens in (6, 3, 2))
    rows = [[5, 9, *first, 3, *second, 11, 7, 8], [8, 4, *third, 6]]
    return Sight(limited(model), rows, GEMMA4_IMAGES, GEMMA4_KINDS, tolerance=GEMMA4_ROUNDING, **facts)


@sight
def gemma4() -> Sight:
    from transformers import Gemma4Config, Gemma4ForConditionalGeneration

    text = gemma4_text(hidden_size_per_layer_input=0, use_bidirectional_attention="vision", attention_k_eq_v=True)
    config = Gemma4Config(text_config=text, vision_config=GEMMA4_VIT, audio_config=None, **GEMMA4_TOKENS)
    return with_gemma4_images(tiny(Gemma4ForConditionalGeneration, config))


@sight
def diffusion_gemma() -> Sight:
    from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion

    known = ("vocab_size_per_layer_input", "num_kv_shared_layers")
    text = {key: value for key, value in gemma4_text().items() if key not in known}
    text |= {"use_bidirectional_attention": "vision", "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 16}
    tokens = {key: value for key, value in GEMMA4_TOKENS.items() if key in ("image_token_id", "boi_token_id")}
    config = DiffusionGemmaConfig(
        text_config=text, vision_config=GEMMA4_VIT, eoi_token_id=END, canvas_length=5, **tokens
    )
    return with_gemma4_images(tiny(DiffusionGemmaForBlockDiffusion, config), masks_of_generate=True)


@sight
def gemma4_with_sound() -> Sight:
    from transformers import Gemma4Config, Gemma4ForConditionalGeneration

    vision = {
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "head_dim": 8,
        "patch_size": 4,
        "pooling_kernel_size": 2,
        "position_embedding_size": 16,
        "use_clipped_linears": True,
    }
    audio = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "subsampling_conv_channels": [8, 6],
        "output_proj_dims": 20,
        "attention_chunk_size": 4,
        "attention_context_left": 5,
        "rms_norm_eps": 1e-3,
    }
    text = gemma4_text(hidden_size_per_layer_input=8, pad_token_id=3)
    config = Gemma4Config(text_config=text, vision_config=vision, audio_config=audio, **GEMMA4_TOKENS)
    frames, is_sound = noise(2, 45, 8), np.ones((2, 45), bool)
    is_sound[1, 22:] = False
    first, second, third = ([START, *[IMAGE] * tokens, END] for tokens in (6, 3, 2))
    rows = [
        [5, 9, *first, 3, *[SOUND] * 12, *second, 11, 7],
        [8, 4, *[SOUND] * 6, *third, 6],
    ]
    features = {**GEMMA4_IMAGES, "input_features": frames, "input_features_mask": is_sound}
    model = limited(tiny(Gemma4ForConditionalGeneration, config))
    return Sight(model, rows, features, GEMMA4_KINDS, parts=("vision", "audio"), tolerance=GEMMA4_ROUNDING)


@sight
def gemma4_unified() -> Sight:
    from transformers import Gemma4UnifiedConfig, Gemma4UnifiedForConditionalGeneration

    text = gemma4_text()
    del text["vocab_size_per_layer_input"]
    vision = {
        "patch_size": 2,
        "pooling_kernel_size": 2,
        "mm_embed_dim": 24,
        "mm_posemb_size": 16,
        "output_proj_dims": 24,
    }
    audio = {"audio_embed_dim": 10}
    config = Gemma4UnifiedConfig(text_config=text, vision_config=vision, audio_config=audio, **GEMMA4_TOKENS)
    is_sound = np.ones((2, 7), bool)
    is_sound[1, 4:] = False
    first, second, third = ([START, *[IMAGE] * tokens, END] for tokens in (24, 12, 8))
    rows = [[5, *first, *[SOUND] * 7, *second, 11, 7], [8, *[SOUND] * 4, *third, 6]]
    features = {**GEMMA4_IMAGES, "input_features": noise(2, 7, 10), "input_features_mask": is_sound}
    model = tiny(Gemma4UnifiedForConditionalGeneration, config)
    return Sight(model, rows, features, GEMMA4_KINDS, parts=("vision", "audio"), masks_of_generate=True)


WHISPER = {
    "num_mel_bins": 6,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 96,
    "max_source_positions": 12,
}
OLDER_WHISPER = {
    "num_mel_bins": 6,
    "d_model": 24,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 40,
    "max_source_positions": 12,
}


def heard(
    model_type: str, text_type: str, audio: dict[str, Any], counts: tuple[int, ...], mask: str = "", **keys: Any
) -> Sight:
    """A case of three sounds of 24, 17 and 10 frames, of which the encoder makes as many features as `counts` says."""

    import transformers
    from transformers import CONFIG_MAPPING

    config = CONFIG_MAPPING[model_type](
        text_config={**TEXT, "model_type": text_type}, audio_config=audio, audio_token_id=SOUND, **keys
    )
    cls = getattr(transformers, type(config).__name__.replace("Config", "ForConditionalGeneration"))
    first, second, third = ([START, *[SOUND] * count, END] for count in counts)
    rows = [[5, 9, *first, 3, *second, 11, 7], [8, 4, *third, 6]]
    features = {"input_features": noise(3, 6, 24)}
    if mask:
        features[mask] = np.arange(24) < np.array([[24], [17], [10]])
    return Sight(tiny(cls, config), rows, features, parts=("audio",))


@sight
def qwen2_audio() -> Sight:
    return heard("qwen2_audio", "qwen2", OLDER_WHISPER, (6, 4, 2), "feature_attention_mask")


@sight
def voxtral() -> Sight:
    return heard("voxtral", "llama", WHISPER, (3, 3, 3))


@sight
def audioflamingo3() -> Sight:
    return heard("audioflamingo3", "qwen2", WHISPER, (6, 4, 2), "input_features_mask", projector_bias=False)


@sight
def musicflamingo() -> Sight:
    audio = {**WHISPER, "model_type": "audioflamingo3_encoder"}
    case = heard("musicflamingo", "qwen2", audio, (6, 4, 2), "input_features_mask", audio_frame_step=0.25)
    windows = [START, *[SOUND] * 10, END]  # of one sound
    return replace(case, rows=[[5, 9, *windows, 11, 7], case.rows[1]])


@sight
def glmasr() -> Sight:
    audio = {**WHISPER, "num_key_value_heads": 1}
    del audio["max_source_positions"]
    return heard("glmasr", "llama", audio, (3, 2, 1), "input_features_mask")


@sight
def moss_transcribe_diarize() -> Sight:
    return heard("moss_transcribe_diarize", "qwen3", WHISPER, (3, 3, 2), "input_features_mask")


QWEN_AUDIO = {
    "num_mel_bins": 10,
    "d_model": 24,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 40,
    "max_source_positions": 64,
}
OMNI_TOKENS = {
    **QWEN_TOKENS,
    "video_token_id": 90,
    "audio_token_id": SOUND,
    "audio_start_token_id": 91,
    "audio_end_token_id": 92,
}


def omni(model_type: str, lengths: tuple[int, int], counts: tuple[int, int], **thinker: Any) -> Sight:
    """A case of Qwen-Omni: a text with two images and a sound, and one with an image and a sound."""
    import transformers
    from transformers import CONFIG_MAPPING

    config = CONFIG_MAPPING[model_type](thinker_config=thinker, enable_audio_output=False)
    cls = getattr(transformers, type(config).__name__.replace("Config", "ForConditionalGeneration"))
    first, second = ([91, *[SOUND] * count, 92] for count in counts)
    rows = [
        [5, 9, START, *[IMAGE] * 15, END, 3, *first, START, *[IMAGE] * 8, END, 11, 7],
        [7, *second, 6, START, *[IMAGE] * 8, END, 3],
    ]
    features = {
        "pixel_values": noise(int(GRIDS.prod(axis=1).sum()), 3 * 2 * 4 * 4),
        "image_grid_thw": GRIDS,
        "input_features": noise(2, 10, max(lengths)),
        "feature_attention_mask": np.arange(max(lengths)) < np.array(lengths)[:, None],
    }
    return Sight(tiny(cls, config), rows, features, parts=("vision", "audio"))


def qwen3_omni(lengths: tuple[int, int], counts: tuple[int, int]) -> Sight:
    vision = {**QWEN_VISION, "num_position_embeddings": 36, "deepstack_visual_indexes": [0, 2]}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    audio = {**QWEN_AUDIO, "n_window_infer": 200, "output_dim": 64, "downsample_hidden_size": 6}
    parts = {"text_config": wide(4, 2, 2, **experts), "vision_config": vision, "audio_config": audio}
    return omni("qwen3_omni_moe", lengths, counts, **parts, **OMNI_TOKENS)


@sight
def qwen3_omni_moe() -> Sight:
    return qwen3_omni((330, 60), (43, 8))


@sight
def qwen3_omni_moe_of_short_sounds() -> Sight:
    """No sound fills a chunk: convolutions read zeros behind the longest."""
    return qwen3_omni((70, 60), (9, 8))


@sight
def qwen2_5_omni() -> Sight:
    vision = {**QWEN_VISION, "window_size": 16, "fullatt_block_indexes": [1]}
    audio = {**QWEN_AUDIO, "n_window": 8, "output_dim": 64}
    tokens = {key.replace("_token_id", "_token_index"): value for key, value in OMNI_TOKENS.items()}
    parts = {"text_config": without_head_dim(wide(2, 3, 3)), "vision_config": vision, "audio_config": audio}
    return omni("qwen2_5_omni", (43, 22), (11, 5), **parts, **OMNI_TOKENS, **tokens)


def thinker_of(case: Sight) -> Sight:
    """The part of a model that reads and thinks, saved on its own."""
    return replace(case, model=case.model.thinker)


@sight
def qwen2_5_omni_thinker() -> Sight:
    return thinker_of(qwen2_5_omni())


@sight
def qwen3_omni_moe_thinker() -> Sight:
    return thinker_of(qwen3_omni_moe())


@sight
def qwen3_asr() -> Sight:
    audio = {**QWEN_AUDIO, "n_window_infer": 200, "output_dim": 32, "downsample_hidden_size": 6}
    case = heard("qwen3_asr", "qwen3", {**audio, "max_position_embeddings": 13}, (30, 8, 26))
    is_sound = np.arange(300) < np.array([[230], [60], [200]])
    return replace(case, features={"input_features": noise(3, 10, 300), "input_features_mask": is_sound})


@sight
def llama4() -> Sight:
    from transformers import Llama4Config, Llama4ForConditionalGeneration

    text = {**TEXT, "num_local_experts": 2, "intermediate_size_mlp": 40, "attention_chunk_size": 8}
    vision = {
        "hidden_size": 24,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "image_size": 24,
        "patch_size": 4,
        "projector_input_dim": 40,
        "projector_output_dim": 40,
        "vision_output_dim": 40,
    }
    config = Llama4Config(text_config=text, vision_config=vision, image_token_index=IMAGE)
    tile = [START, *[IMAGE] * 9, END]
    rows = [[5, 9, *tile, 3, *tile, 11, 7], [8, 4, *tile, 6]]
    return Sight(tiny(Llama4ForConditionalGeneration, config), rows, {"pixel_values": noise(3, 3, 24, 24)})


@sight
def qwen4_exp() -> Sight:
    from transformers import AutoConfig, AutoModelForMultimodalLM

    vision = {**QWEN_VISION, "num_position_embeddings": 36}
    experts = {
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 20,
        "shared_expert_intermediate_size": 28,
    }
    # Enough heads that the scores of no two blocks are 0.
    indexer = {
        "indexer_n_heads": 16,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 10,
        "indexer_budget": 6,
        "indexer_compress_ratio": 2,
        "hc_lowrank": 9,
    }
    ngrams = {
        "ple_layer_ids": [1],
        "ple_embed_dim": 24,
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 20,
        "make_ngram_vocab_size_divisible_by": 128,
        "split_ngram_parts": 4,
    }
    text = wide(**LINEAR, **partial(2, 1, 1), **experts, **indexer, **ngrams, full_attention_interval=2)
    config = AutoConfig.for_model("qwen4_exp", text_config=text, vision_config=vision, **QWEN_TOKENS)
    derived = "ngram_heads_vocab_sizes|ngram_heads_offsets|layer_multipliers"
    return qwen(AutoModelForMultimodalLM, config, tolerance=2e-5, derived=derived)


@sight
def kimi_k25() -> Sight:
    from transformers import CONFIG_MAPPING, Kimi_K25ForConditionalGeneration

    text = {
        **without_head_dim(TEXT),
        "model_type": "deepseek_v3",
        "num_key_value_heads": 4,
        "q_lora_rank": 12,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
        "num_nextn_predict_layers": 0,
    }
    vision = {
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "patch_size": 4,
        "pos_emb_height": 5,
        "pos_emb_width": 5,
    }
    config = CONFIG_MAPPING["kimi_k25"](
        text_config=text, vision_config=vision, projection_hidden_size=24, **QWEN_TOKENS
    )
    case = qwen(Kimi_K25ForConditionalGeneration, config)
    patches = noise(int(GRIDS.prod(axis=1).sum()), 3, 4, 4)
    return replace(case, features={**case.features, "pixel_values": patches}, kinds={})


MUSE = {
    "vision_config": {
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "patch_size": 4,
        "pos_emb_height": 5,
        "pos_emb_width": 5,
    },
    "out_hidden_size": 96,
    "projector_hidden_size": 40,
    "image_token_id": IMAGE,
    "video_token_id": 92,
}


@sight
def muse_glimmer() -> Sight:
    from transformers import CONFIG_MAPPING, MuseGlimmerForConditionalGeneration

    config = CONFIG_MAPPING["muse_glimmer"](text_config=TEXT, **MUSE)
    return replace(qwen(MuseGlimmerForConditionalGeneration, config), kinds={})


@sight
def muse_spark() -> Sight:
    from transformers import CONFIG_MAPPING, MuseSparkForConditionalGeneration

    text = {
        **TEXT,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "moe_hidden_size": 24,
    }
    audio = {
        "patch_sizes": [3, 2, 1, 2],
        "hidden_sizes": [8, 10, 12, 14],
        "depths": [1, 2, 1, 1],
        "conv_kernel_size": 3,
        "mlp_ratio": 1.5,
        "out_hidden_size": 32,
    }
    config = CONFIG_MAPPING["muse_spark"](text_config=text, audio_config=audio, audio_token_id=SOUND, **MUSE)
    case = qwen(MuseSparkForConditionalGeneration, config)
    sounds = {"input_values": noise(2, 60), "input_values_mask": np.arange(60) < np.array([[60], [28]])}
    rows = [[*case.rows[0], *[SOUND] * 5], [*[SOUND] * 3, *case.rows[1]]]
    return replace(case, rows=rows, features={**case.features, **sounds}, kinds={}, parts=("vision", "audio"))


@sight
def fun_asr_nano() -> Sight:
    audio = {
        "num_mel_bins": 5,
        "num_stacked_frames": 2,
        "hidden_size": 24,
        "num_attention_heads": 3,
        "intermediate_size": 40,
        "num_hidden_layers": 4,
        "num_timestamp_prediction_layers": 2,
        "fsmn_kernel_size": 4,
    }
    adaptor = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 8, "projector_hidden_size": 28}
    case = heard("fun_asr_nano", "qwen3", audio, (9, 6, 4), adaptor_config=adaptor)
    is_sound = np.arange(9) < np.array([[9], [6], [4]])
    return replace(case, features={"input_features": noise(3, 9, 10), "input_features_mask": is_sound})


def _granite_speech(model_type: str, frames: int, counts: tuple[int, ...], **encoder: Any) -> Sight:
    """Sounds of so many frames, whose last block and window are not full; `counts` are the windows of each."""
    import transformers
    from transformers import CONFIG_MAPPING

    sizes = {"input_dim": 10, "num_layers": 5, "hidden_dim": 24, "feedforward_mult": 2, "num_heads": 3, "dim_head": 6}
    sizes |= {"output_dim": 7, "context_size": 6, "max_pos_emb": 9, "conv_kernel_size": 4, "conv_expansion_factor": 2}
    query = {"model_type": "blip_2_qformer", "hidden_size": 20, "num_hidden_layers": 3, "num_attention_heads": 2}
    query |= {
        "intermediate_size": 28,
        "use_qformer_text_input": model_type == "granite_speech_plus",
        "encoder_hidden_size": 24 * (1 + len(encoder.get("cat_hidden_layers", ()))),
    }
    text = {"model_type": "granite", "logits_scaling": 3.0, "embedding_multiplier": 2.0, "attention_multiplier": 0.2}
    config = CONFIG_MAPPING[model_type](
        text_config={**TEXT, **text},
        encoder_config={**sizes, **encoder},
        projector_config=query,
        audio_token_index=SOUND,
        downsample_rate=2,
        window_size=6,
    )
    cls = getattr(transformers, type(config).__name__.replace("Config", "ForConditionalGeneration"))
    rows = [[5, 9, *[SOUND] * 3 * counts[0], 3, *[SOUND] * 3 * counts[1], 11, 7], [8, 4, *[SOUND] * 3 * counts[2], 6]]
    mask = np.arange(3 * max(counts)) < 3 * np.array(counts)[:, None]
    features = {"input_features": noise(3, frames, 10), "input_features_mask": mask}
    return Sight(with_statistics(tiny(cls, config)), rows, features, parts=("audio",))


def with_statistics(model: Any) -> Any:
    """The model with batch norms that were trained."""
    import torch

    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("running_mean"):
                buffer.copy_(torch.randn_like(buffer))
            if name.endswith("running_var"):
                buffer.copy_(torch.rand_like(buffer) + 0.5)
            if name.endswith("num_batches_tracked"):
                buffer.fill_(12345)
    return model


@sight
def granite_speech() -> Sight:
    return _granite_speech("granite_speech", 20, (4, 2, 3))


@sight
def granite_speech_plus() -> Sight:
    return _granite_speech("granite_speech_plus", 18, (3, 2, 1), cat_hidden_layers=[3, 0, 2])


def with_samples(model: Any, samples: list[int], tokens: list[int], masked: Any) -> Sight:
    """Sounds of so many samples, with so many features; the second text has the last one. `masked` is the dtype of the
    mask; None without one."""
    first, *others, last = ([SOUND] * count for count in tokens)
    rows = [[5, 9, *first, 3, *(others[0] if others else []), 11, 7], [8, 4, *last, 6]]
    mask = np.arange(max(samples)) < np.array(samples)[:, None]
    features = {"input_values": noise(len(samples), 1, max(samples)) * mask[:, None]}
    if masked is not None:
        features["padding_mask"] = mask.astype(masked)
    return Sight(model, rows, features, parts=("audio",))


def omniasr_of(samples: list[int], tokens: list[int], masked: Any = np.int64, **audio: Any) -> Sight:
    from transformers import OmniASRConfig, OmniASRForConditionalGeneration

    hears = {
        **{"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 3},
        **{"conv_dim": [10, 14, 12], "conv_kernel": [10, 3, 2], "conv_stride": [5, 2, 2]},
        **{"num_conv_pos_embeddings": 6, "num_conv_pos_embedding_groups": 4, **audio},
    }
    text = {**TEXT, "model_type": "llama"}
    config = OmniASRConfig(audio_config=hears, text_config=text, audio_token_id=SOUND)
    return with_samples(tiny(OmniASRForConditionalGeneration, config), samples, tokens, masked)


@sight
def omniasr() -> Sight:
    """Sounds of other lengths; the second has padding behind it."""
    return omniasr_of([205, 131, 88], [9, 6, 3])


@sight
def omniasr_without_masks() -> Sight:
    """Sounds of one length, without biases of convolutions, and another activation."""
    other = {"conv_bias": False, "hidden_act": "gelu_new", "conv_dim": [8, 8], "conv_kernel": [5, 4]}
    return omniasr_of([90, 90], [14, 14], None, conv_stride=[2, 3], layer_norm_eps=1e-3, **other)


def vibevoice_asr_of(samples: list[int], tokens: list[int], masked: Any = bool, **given: Any) -> Sight:
    """12 samples make a feature."""
    from transformers import VibeVoiceAsrConfig, VibeVoiceAsrForConditionalGeneration

    hears = {
        **{"hidden_size": 10, "kernel_size": 5, "num_filters": 6, "downsampling_ratios": [2, 3, 2], "ffn_expansion": 3},
        **{"depths": [1, 2, 0, 2], "layer_scale_init_value": 0.7},
    }
    also = {"hidden_size": 14, "kernel_size": 4, "num_filters": 5, "downsampling_ratios": [4, 3], "depths": [2, 1, 1]}
    config = VibeVoiceAsrConfig(
        acoustic_tokenizer_encoder_config={**hears, "model_type": "vibevoice_acoustic_tokenizer_encoder"},
        semantic_tokenizer_encoder_config={**hears, **also, "model_type": "vibevoice_acoustic_tokenizer_encoder"},
        text_config={**TEXT, "model_type": "qwen2"},
        audio_token_id=SOUND,
        **given,
    )
    return with_samples(tiny(VibeVoiceAsrForConditionalGeneration, config), samples, tokens, masked)


@sight
def vibevoice_asr() -> Sight:
    """Sounds of other lengths, which fill no feature, each in one chunk."""
    return vibevoice_asr_of([84, 50, 31], [7, 5, 3])


@sight
def vibevoice_asr_of_chunks() -> Sight:
    """Sounds of five chunks, of which the last is not full."""
    return vibevoice_asr_of([108, 108], [9, 9], None, acoustic_tokenizer_chunk_size=24)
