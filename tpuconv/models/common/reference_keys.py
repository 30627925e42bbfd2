"""The keys of config.json that transformers 5.23.0 reads. Written by tools/reference_keys.py."""

from collections.abc import Mapping

SHARED = frozenset(
    (
        "_attn_implementation _auto_class _commit_hash _configuration_file _experts_implementation _from_auto "
        "_from_pipeline _is_quantized _name_or_path adapter_kwargs adapter_name allow_all_kernels "
        "allow_is_causal_skip architectures attention_chunk_size attention_dropout attn_implementation attribute_map "
        "base_config_key base_model_ep_plan base_model_fsdp_plan base_model_pp_plan base_model_tp_plan bos_token_id "
        "cache_dir chain_hidden_post_norm chunk_size_feed_forward classifier_dropout commit_message compile_config "
        "configuration_files create_compatible_mapping create_pr default_theta device device_map device_mesh "
        "disable_mmap disk_offload_folder distributed_config dtype eos_token_id experts_implementation "
        "extra_config_files extra_files first_k_dense_replace force_download fusion_config generation_config get "
        "gguf_file gradient_checkpointing head_dim hf_quantizer hidden_act hidden_dropout hidden_size id2label "
        "ignore_mismatched_sizes init_std initializer_factor initializer_range intermediate_size is_causal "
        "is_encoder_decoder is_heterogeneous is_quantized kernel_config key_mapping kv_sharing_modes label2id "
        "layer_types local_files_only logits_mup_width_multiplier max_memory max_position_embeddings mlp_layer_types "
        "model_type moe_intermediate_size mtp_hidden_states_first mtp_layer_types mtp_mlp_layer_types "
        "mtp_per_layer_config n_routed_experts name_or_path num_attention_heads num_hidden_layers num_key_value_heads "
        "num_labels num_mtp_layers number_of_conv_states offload_buffers offload_folder output_attentions "
        "output_hidden_states output_loading_info pad_token_id partial_rotary_factor per_layer_config "
        "pretrained_model_name_or_path problem_type proxies quant_method quantization_config repo_id return_dict "
        "return_unused_kwargs revision rms_norm_eps rope_parameters rope_scaling rope_theta sanitize_kernel_mapping "
        "sep_token_id sharded_metadata sliding_window softcap state_dict sub_config_name sub_configs "
        "sub_configs_defaults subfolder tags tie_word_embeddings token token_classification_bias torch_dtype tp_plan "
        "tp_size tqdm_class transformers_version transformers_weights trust_remote_code unpadded_vocab_size use_cache "
        "use_kernels variant vocab_size weight_mapping weights_only "
    ).split()
)
"""Those that every model reads."""

_OWN = {
    "deepseek_v3": (
        "attention_bias kv_lora_rank n_group n_shared_experts norm_topk_prob num_experts_per_tok num_local_experts "
        "output_router_logits pretraining_tp q_lora_rank qk_nope_head_dim qk_rope_head_dim rope_interleave "
        "routed_scaling_factor topk_group v_head_dim "
    ),
    "gpt_oss": (
        "attention_bias num_experts num_experts_per_tok num_local_experts output_router_logits router_aux_loss_coef "
        "swiglu_alpha swiglu_limit "
    ),
    "kimi_k2": (
        "attention_bias kv_lora_rank n_group n_shared_experts norm_topk_prob num_experts_per_tok num_local_experts "
        "output_router_logits pretraining_tp q_lora_rank qk_nope_head_dim qk_rope_head_dim rope_interleave "
        "routed_scaling_factor topk_group v_head_dim "
    ),
    "llama": (
        "attention_bias mlp_bias pretraining_tp "
    ),
    "llama4": (
        "attention_bias attn_scale attn_temperature_tuning boi_token_id boi_token_index eoi_token_id eoi_token_index "
        "floor_scale image_size image_token_id image_token_index intermediate_size_mlp moe_layers no_rope_layers "
        "num_channels num_experts_per_tok num_local_experts patch_size pixel_shuffle_ratio projector_dropout "
        "projector_input_dim projector_output_dim text_config use_qk_norm vision_config "
    ),
    "llama4_text": (
        "attention_bias attn_scale attn_temperature_tuning floor_scale image_size image_token_id "
        "interleave_moe_layer_step intermediate_size_mlp moe_layers no_rope_layer_interval no_rope_layers "
        "num_channels num_experts_per_tok num_local_experts output_router_logits patch_size pixel_shuffle_ratio "
        "projector_dropout projector_input_dim projector_output_dim router_aux_loss_coef router_jitter_noise "
        "text_config use_qk_norm vision_config "
    ),
    "mistral": (
        ""
    ),
    "mixtral": (
        "num_experts num_experts_per_tok num_local_experts output_router_logits router_aux_loss_coef "
        "router_jitter_noise "
    ),
    "olmo2": (
        "attention_bias "
    ),
    "qwen2": (
        "max_window_layers use_sliding_window "
    ),
    "qwen3": (
        "attention_bias max_window_layers use_sliding_window "
    ),
    "qwen3_moe": (
        "attention_bias decoder_sparse_step mlp_only_layers norm_topk_prob num_experts num_experts_per_tok "
        "output_router_logits router_aux_loss_coef use_sliding_window "
    ),
}

READ: Mapping[str, frozenset[str]] = {kind: SHARED.union(names.split()) for kind, names in _OWN.items()}
"""Model type to all keys that the reference reads."""
