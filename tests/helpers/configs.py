"""Small config.json files of every model_type, and descriptions of encodings."""

from typing import Any

from tpuconv.convert.plan.coverage import make_plan
from tpuconv.convert.plan.source_from_config import source_from_config
from tpuconv.convert.plan.types import Options
from tpuconv.models.common.key_types import hints_of
from tpuconv.models.common.wrapper import WrapperConfig
from tpuconv.models.registry import all_families, find_family
from tpuconv.sources.source import Source

NAMES = [name for family in all_families() for name in family.architectures.values()]
SMALL = {
    "num_hidden_layers": 2,
    "num_experts": 16,
    "num_local_experts": 16,
    "n_routed_experts": 16,
    "first_k_dense_replace": 1,
    "vocab_size": 64,
    "unpadded_vocab_size": 64,
}
OF_TYPES = {
    **{name: {"num_hidden_layers": 4} for name in ("nemotron_h", "nemo_speechlm", "nemotron_h_puzzle")},
    "zamba": {"num_hidden_layers": 9, "attn_layer_period": 2},
    "zamba2": {"num_hidden_layers": 54},
    "domynedge": {"num_hidden_layers": 36},
    **{name: {"num_kv_shared_layers": 0} for name in ("gemma3n_text", "gemma3n")},
    "ernie4_5_vl_moe": {"head_dim": 128},
    "telechat": {"base_seqlen": 8192},
    "dory": {"n_input_layers": 1, "n_output_layers": 0},
    **{name: {"postnorm": True} for name in ("minimax_text_01", "minimax_m1")},
    **{
        name: {"n_layers_per_attn_res_block": 1, "loop_layer_index_start": 1, "loop_layer_index_end": 2}
        for name in ("inkling2_loop_text", "inkling2_loop")
    },
}
"""What must be otherwise: the number of the layers whose kinds are the default, or of those that run once, or a value
that transformers has another default for."""


def config_json(name: str, **changes: Any) -> dict[str, Any]:
    """A small config.json of a model_type with some keys changed."""
    config = find_family({"model_type": name}).config
    names = hints_of(config).keys() - config.derived - config.only.keys()
    known = {name for name in names if config._key(name) == name}
    text = {**{key: value for key, value in SMALL.items() if key in known}, **OF_TYPES.get(name, {}), **changes}
    nested = issubclass(config, WrapperConfig) and not config.flat
    return {"model_type": name, **({"text_config": text} if nested else text)}


def plan_of(raw: dict[str, Any]) -> None:
    """All that is made of a config.json alone, and of one beside the headers of another model."""
    family = find_family(raw)
    config = family.config.from_hf(raw)
    assert len(config.windows) == config.num_hidden_layers
    source = source_from_config("x", raw, family.table, config)
    few = dict(list(source.tensors.items())[:10])
    make_plan(Source(source.folder, raw, few, source.shards), family.name, family.table, config, Options())
    if source.nbytes < 100 << 30:  # larger ones there are, in pieces that take some microseconds each
        make_plan(source, family.name, family.table, config, Options())


WEIGHTS = {"type": "float", "num_bits": 8, "strategy": "group", "group_size": 32, "symmetric": True}
ENCODINGS = {
    "fp8": {"modules_to_not_convert": ["lm_head"], "weight_block_size": [128, 128], "fmt": "e4m3"},
    "fbgemm_fp8": {"modules_to_not_convert": ["lm_head"]},
    "mxfp4": {"modules_to_not_convert": ["lm_head"]},
    "modelopt": {
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {"model.layers.0": {"quant_algo": "FP8_PB_WO", "group_size": 128}},
    },
    "modelopt_fp4": {"quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}},
    "compressed-tensors": {
        "format": "float-quantized",
        "ignore": ["lm_head", "re:.*router"],
        "config_groups": {"group_0": {"targets": ["Linear"], "format": None, "weights": WEIGHTS}},
        "sparsity_config": {},
        "transform_config": None,
    },
    "awq": {"bits": 4, "group_size": 32, "version": "gemm", "zero_point": True, "modules_to_not_convert": None},
    "gptq": {"bits": 4, "group_size": 32, "desc_act": True, "sym": False, "checkpoint_format": "gptq", "dynamic": {}},
    "quark": {
        "global_quant_config": {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_block", "block_size": [32, 32]}},
        "layer_quant_config": {
            "*self_attn*": {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_channel", "ch_axis": 0}},
            "*up_proj": {"weight": [{"dtype": "uint4", "qscheme": "per_group", "group_size": 8, "symmetric": False}]},
        },
        "exclude": ["lm_head", "re:.*router"],
        "algo_config": [{"name": "awq"}],
        "export": {"pack_method": "reorder", "weight_format": "real_quantized"},
    },
    "mlx": {
        **{"bits": 4, "group_size": 64, "mode": "affine", "model_type": "llama"},
        "model.layers.0.mlp.up_proj": {"bits": 4, "group_size": 32, "mode": "mxfp4"},
        "model.embed_tokens": False,
    },
    "torchao": {
        "modules_to_not_convert": ["lm_head"],
        "quant_type": {
            "default": {
                "_type": "FqnToConfig",
                "_data": {
                    "fqn_to_config": {
                        "_default": {"_type": "Float8WeightOnlyConfig", "_data": {}},
                        "re:.*up_proj": {
                            "_type": "IntxWeightOnlyConfig",
                            "_data": {
                                "granularity": {"_type": "PerGroup", "_data": {"group_size": 32}},
                                "weight_dtype": {"_type": "torch.dtype", "_data": "int4"},
                            },
                        },
                        "model.layers.0.mlp.gate_proj": None,
                    }
                },
            }
        },
    },
    "bitnet": {"linear_class": "autobitlinear", "quantization_mode": "offline", "modules_to_not_convert": ["lm_head"]},
}
