"""The files of a Hugging Face checkpoint: their names, and how large each may be."""

CONFIG_FILE = "config.json"
ENCODING_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json", "quantization_config.json")
"""Descriptions of how the weights are encoded, by ModelOpt, AutoGPTQ, AutoAWQ and auto-round. Older releases have one
of them instead of config.json's key."""
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""The files of an adapter of PEFT."""

MAX_HEADER_BYTES = 32 << 20  # the largest real ones have 2 MiB; a parser bomb has 100 MiB
MAX_INDEX_BYTES = 64 << 20
