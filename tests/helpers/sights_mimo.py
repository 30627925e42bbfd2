"""A tiny model with the encoders of MiMo V2.5, which transformers does not have, in the files of its release."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np

from helpers.checkpoints import read_tensors, write_checkpoint
from helpers.sights import GRIDS, IMAGE, SOUND, TEXT, Sight, noise, qwen, sight

MIMO_TEXT = {
    **TEXT,
    **{"head_dim": 12, "v_head_dim": 10, "num_attention_heads": 8, "moe_intermediate_size": 20},
    **{"n_routed_experts": 6, "num_experts_per_tok": 2, "sliding_window": 5},
}
MIMO_VISION = {
    "depth": 6,
    "fullatt_block_indexes": [0, 3],
    "hidden_act": "silu",
    "hidden_size": 24,
    "in_chans": 3,
    "intermediate_size": 40,
    "kv_channels": 8,
    "num_heads": 4,
    "num_key_value_heads": 2,
    "num_query_groups": 4,
    "out_hidden_size": 32,
    "patch_size": 4,
    "qk_channels": 8,
    "spatial_merge_size": 2,
    "spatial_patch_size": 4,
    "temporal_patch_size": 2,
    "tokens_per_second": 2,
    "use_sink": True,
    "visual_token_window_size": 5,
    "vit_window_attn_types": [-1, 0, 1, 1, 0, 1],
    "window_size": 128,
}
MIMO_AUDIO = {
    "add_post_norm": True,
    "audio_channels": 3,
    "audio_segment_size": 6000,
    "group_size": 4,
    "input_full_attention": True,
    "input_local_attn_heads": 2,
    "input_local_dim": 16,
    "input_local_head_dim": 8,
    "input_local_hidden_dropout": 0.0,
    "input_local_intermediate_size": 20,
    "input_local_layers": 2,
    "out_hidden_size": 32,
    "partial_rotary_factor": 1.0,
    "projection_layers": 2,
    "rope_theta": 640000,
    "speech_vocab_size": "11",
    "speech_zeroemb_idx": "10",
}


def of_mimo_v2(folder: Path) -> None:
    """Writes the config.json of the release, which says other keys, and one matrix of queries, keys and values."""
    raw, tensors = json.loads((folder / "config.json").read_text()), read_tensors(folder)
    for name in [name for name in tensors if re.search(r"^model\..*\.q_proj\.weight", name)]:
        q, k, v = (tensors.pop(name.replace("q_proj", f"{x}_proj")) for x in "qkv")
        parts = [x.reshape(raw["num_key_value_heads"], -1, x.shape[1]) for x in (q, k, v)]
        tensors[name.replace("q_proj", "qkv_proj")] = np.concatenate(parts, 1).reshape(-1, q.shape[1])
    rope = raw.pop("rope_parameters")
    released = {
        **{"architectures": ["MiMoV2ForCausalLM"], "model_type": "mimo_v2", "attention_projection_layout": "fused_qkv"},
        **{"add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False},
        "hybrid_layer_pattern": [int(kind == "sliding_attention") for kind in raw.pop("layer_types")],
        "moe_layer_freq": [int(kind == "sparse") for kind in raw.pop("mlp_layer_types")],
        "layernorm_epsilon": raw.pop("rms_norm_eps"),
        "partial_rotary_factor": rope["full_attention"]["partial_rotary_factor"],
        "rope_scaling": {"rope_type": "default", "type": "default"},
        "rope_theta": rope["full_attention"]["rope_theta"],
        "swa_rope_theta": rope["sliding_attention"]["rope_theta"],
        "sliding_window_size": raw["sliding_window"] - 1,
        "swa_num_key_value_heads": 2 * raw["num_key_value_heads"],
        "swa_num_attention_heads": raw["num_attention_heads"],
        **{"swa_head_dim": raw["head_dim"], "swa_v_head_dim": raw["v_head_dim"]},
        **{"processor_config": {"patch_size": 4}, "vision_model_type": "mimovl"},
    }
    write_checkpoint(folder, raw | released, tensors)


@sight
def mimo_v2() -> Sight:
    from helpers.released_code.mimo_v2 import Config, MiMoV2ForCausalLM

    tokens = {"image_token_id": IMAGE, "audio_token_id": SOUND, "video_token_id": 92}
    config = Config(**MIMO_TEXT, vision_config=MIMO_VISION, audio_config=MIMO_AUDIO, **tokens)
    case = qwen(MiMoV2ForCausalLM, config)
    first, second = case.rows
    features = {
        **case.features,
        "pixel_values": noise(int(GRIDS.prod(axis=1).sum()), 3 * 2 * 4 * 4),
        "audio_codes": np.random.default_rng(2).integers(0, 11, (4 * 6, 3)),
    }
    rows = [[*first, *[SOUND] * 3, 6], [*second, *[SOUND] * 2, 4, SOUND]]
    parts = ("vision", "audio")
    return replace(case, rows=rows, features=features, kinds={}, as_released=of_mimo_v2, parts=parts)
