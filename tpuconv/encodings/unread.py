"""The keys of a `quantization_config` that are not read, and may say something of the stored values."""

from collections.abc import Iterator, Mapping
from typing import Any

from tpuconv.encodings.bitsandbytes import METHOD
from tpuconv.encodings.schemes import METHOD_SCHEMAS, method_of
from tpuconv.jsonfile import Each, Optional
from tpuconv.sources.config import MLX_METHOD

WITHOUT_UNKNOWN = (METHOD, MLX_METHOD)
"""The methods of which no key is unknown: one refuses them, of the other they are names of modules."""
OF_CALIBRATION = (
    *("act_group_aware", "amp", "autoround_version", "batch_size", "cache_block_outputs", "damp_auto_increment"),
    *("damp_percent", "data_type", "dataset", "enable_alg_ext", "enable_minmax_tuning", "enable_norm_bias_tuning"),
    *("enable_quanted_input", "gradient_accumulate_steps", "iters", "low_cpu_mem_usage", "low_gpu_mem_usage", "lr"),
    *("meta", "minmax_lr", "model_dtype", "model_file_base_name", "model_name_or_path", "model_seqlen", "mse"),
    *("module_name_preceding_first_block", "not_use_best_mse", "nsamples", "observer", "observer_cls"),
    *("observer_kwargs", "pad_token_id", "provider", "quant_block_list", "quantizer", "round_method"),
    *("scale_calculation_mode", "seqlen", "static_groups", "sym", "to_quant_block_names", "tokenizer"),
    "true_sequential",
)
OF_KERNELS = (
    *("backend", "dequantize", "disable_exllama", "do_fuse", "enable_buffer_reuse", "exllama_config"),
    *("fuse_max_seq_len", "is_checkpoint_fp8_serialized", "max_input_length", "max_input_numel", "modules_to_fuse"),
    *("packed_modules_mapping", "quant_mode", "run_compressed", "target_device", "use_cuda_fp16", "use_exllama"),
    "use_optimized_inference",
)
OF_INPUTS_AND_CACHES = (
    *("act_data_type", "act_dynamic", "act_group_size", "act_sym", "activation_scale_ub", "activation_scheme"),
    *("dynamic", "input_activations", "is_dynamic", "kv_cache_dtype", "kv_cache_group", "kv_cache_post_rope"),
    *("kv_cache_quant_algo", "kv_cache_quant_config", "kv_cache_scheme", "kv_cache_scheme_dtype", "min_kv_scale"),
    *("output_activations", "output_tensors", "softmax_quant_spec"),
)
OF_TENSORS = (
    *("block_name_to_quantize", "config_groups", "fmt", "include_input_output_embeddings", "is_scale_quant"),
    *("modules_to_convert", "pack_dtype"),
    *("q_group_size", "scale_dtype", "scale_fmt", "untie_embedding_weights", "w_bit", "weight_block_size"),
    *("weight_merge_groups", "zp_dtype"),
)
"""Keys that are read without a schema, or say what names, dtypes and shapes of tensors show."""
OF_FILES = ("global_compression_ratio", "producer", "quant_method", "quantization_status", "rms_norm_eps", "version")
EXPECTED = frozenset((*OF_CALIBRATION, *OF_KERNELS, *OF_INPUTS_AND_CACHES, *OF_TENSORS, *OF_FILES))


def unread_keys(quantization: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys of a `quantization_config` that are not read and may change what the stored values are, with
    their values: `config_groups.*.weights.rotation`. A key that is null, false or empty changes nothing."""
    method = method_of(quantization)
    if method in WITHOUT_UNKNOWN or method not in METHOD_SCHEMAS:
        return {}
    found: dict[str, Any] = {}
    for key, value in _unread(quantization, METHOD_SCHEMAS[method], ""):
        found.setdefault(key, value)
    return found


def _unread(value: Any, schema: Any, where: str) -> Iterator[tuple[str, Any]]:
    """Yields each key within a value that its schema does not have, by its path, and its value."""
    match schema, value:
        case Optional(), _:
            yield from _unread(value, schema.schema, where)
        case tuple(), _:
            for alternative in schema:
                yield from _unread(value, alternative, where)
        case list(), list():
            for item in value:
                yield from _unread(item, schema[0], where)
        case Each(), dict():
            for item in value.values():
                yield from _unread(item, schema.schema, f"{where}*.")
        case dict(), dict():
            for key, item in value.items():
                if key in schema:
                    yield from _unread(item, schema[key], f"{where}{key}.")
                elif key not in EXPECTED and item:
                    yield f"{where}{key}", item
