"""Orion after `modeling_orion.py` of OrionStarAI/Orion-14B-Base, and MiniCPM after `modeling_minicpm.py` of
openbmb/MiniCPM-2B-sft-bf16: Llama with layer norms, and Llama with factors. Tele-FLM after the code of servers (vLLM,
SGLang): Llama with other factors. Solar Pro after the code of a server (vLLM): Mistral whose layers read what entered
earlier ones too."""

from typing import Any

from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM


class OrionConfig(LlamaConfig):
    model_type = "orion"


class OrionForCausalLM(LlamaForCausalLM):
    config_class = OrionConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.input_layernorm = nn.LayerNorm(config.hidden_size, config.rms_norm_eps)
            layer.post_attention_layernorm = nn.LayerNorm(config.hidden_size, config.rms_norm_eps)
        self.model.norm = nn.LayerNorm(config.hidden_size, config.rms_norm_eps)
        self.post_init()


class MiniCpmConfig(LlamaConfig):
    model_type = "minicpm"

    scale_emb: float = 1.0
    scale_depth: float = 1.0
    dim_model_base: int = 1


class MiniCPMForCausalLM(LlamaForCausalLM):
    config_class = MiniCpmConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        of_layers = config.scale_depth / config.num_hidden_layers**0.5
        _multiplied(self.model.embed_tokens, config.scale_emb)
        for layer in self.model.layers:
            _multiplied(layer.self_attn, of_layers)
            _multiplied(layer.mlp, of_layers)
        _multiplied(self.model.norm, config.dim_model_base / config.hidden_size)


class TeleFLMConfig(LlamaConfig):
    model_type = "TeleFLM"

    use_mup: bool = False
    input_mult: float = 1.0
    output_mult: float = 1.0
    mup_scale_factor: float = 1.0


class TeleFLMForCausalLM(LlamaForCausalLM):
    config_class = TeleFLMConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        if config.use_mup:
            _multiplied(self.model.embed_tokens, config.input_mult)
            _multiplied(self.model.norm, config.output_mult / config.mup_scale_factor)


class SolarConfig(MistralConfig):
    model_type = "solar"

    bskcn_1: list[int] | None = None
    bskcn_2: list[int] | None = None
    bskcn_3: list[int] | None = None
    bskcn_4: list[int] | None = None
    bskcn_tv: list[float] | None = None


class SolarForCausalLM(MistralForCausalLM):
    config_class = SolarConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        first, second = {}, {}

        def enter(number: int, x: Any) -> Any:
            _, new = config.bskcn_tv
            if number in config.bskcn_1:
                first["x"] = x
            if number in config.bskcn_2:
                second["x"] = x
            if number in config.bskcn_3:
                x = first["x"] * new + x * (1 - new)
            if number in config.bskcn_4:
                x = second["x"] * new + x * (1 - new)
            return x

        for number, layer in enumerate(self.model.layers):
            layer.register_forward_pre_hook(lambda module, inputs, number=number: (enter(number, inputs[0]),))
        self.post_init()


def _multiplied(module: nn.Module, factor: float) -> None:
    """Multiplies what a module returns, or the first of several. No linear layer is one: with an adapter its output
    would be multiplied without the adapter's."""

    def hook(module: nn.Module, inputs: Any, output: Any) -> Any:
        return (output[0] * factor, *output[1:]) if isinstance(output, tuple) else output * factor

    module.register_forward_hook(hook)
