"""Safetensors as transformers, vLLM and SGLang read them: the names of the release, with our own tree in between."""

from tpuconv.targets.target import OWN_PARTS, Target

HUGGINGFACE = Target(
    name="huggingface",
    summary="transformers, vLLM, SGLang: safetensors; with `quantize=` in the formats of compressed-tensors",
    loading="AutoModelForCausalLM.from_pretrained(OUT)",
    quantized=OWN_PARTS,
    is_safetensors=True,
)
