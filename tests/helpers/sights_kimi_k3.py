"""A tiny model that sees with the encoder of Kimi K3, which transformers does not have. Experts have sizes of MXFP4."""

from dataclasses import replace

from helpers.released import KIMI_K3_VISION
from helpers.sights import GRIDS, IMAGE, TEXT, Sight, noise, qwen, sight, without_head_dim

K3_TEXT = {
    **without_head_dim(TEXT),
    "model_type": "kimi_linear",
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "attn_res_block_size": 2,
    "num_experts": 4,
    "num_experts_per_token": 2,
    "num_shared_experts": 1,
    "moe_intermediate_size": 32,
    "routed_expert_hidden_size": 32,
    "linear_head_dim": 8,
    "linear_num_heads": 3,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "gate_lower_bound": -5.0,
    "hidden_act": "situ",
    "rms_norm_eps": 1e-3,
}
K3_VISION = {
    **KIMI_K3_VISION,
    "init_pos_emb_height": 5,
    "init_pos_emb_width": 5,
    "mm_hidden_size": 24,
    "patch_size": 4,
    "qkv_hidden_size": 48,
    "vt_hidden_size": 24,
    "vt_intermediate_size": 40,
    "vt_num_attention_heads": 3,
    "vt_num_hidden_layers": 2,
}


@sight
def kimi_k3() -> Sight:
    from helpers.released_code.kimi_vision import Config, KimiK3ForConditionalGeneration

    config = Config(text_config=K3_TEXT, vision_config=K3_VISION, media_placeholder_token_id=IMAGE)
    patches = noise(int(GRIDS.prod(axis=1).sum()), 3, 4, 4)
    case = qwen(KimiK3ForConditionalGeneration, config)
    return replace(case, features={**case.features, "pixel_values": patches}, kinds={})
