"""PLaMo 3 after `modeling_plamo.py` of pfnet/plamo-3-nict-2b-base: Gemma 3 with other offsets of norms, without a
factor of embeddings, and with fused matrices."""

from collections.abc import Iterator
from typing import Any, ClassVar

from torch import Tensor, nn
from transformers import Gemma3ForCausalLM, Gemma3TextConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3Attention, Gemma3RMSNorm
from transformers.models.phi3.modeling_phi3 import Phi3MLP

from helpers.released_code.fused import FusedProjections

OF_GEMMA = {
    *("query_pre_attn_scalar", "final_logit_softcapping", "attn_logit_softcapping", "use_bidirectional_attention"),
    "hidden_activation",
}


class Plamo3Config(Gemma3TextConfig):
    model_type = "plamo3"

    hidden_act: str = "silu"

    def to_dict(self) -> dict[str, Any]:
        return {key: value for key, value in super().to_dict().items() if key not in OF_GEMMA}


class Norm(Gemma3RMSNorm):
    def __init__(self, config: Any, offset: float = 1.0) -> None:
        super().__init__(config.hidden_size, config.rms_norm_eps)
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        return self._norm(x) * (self.offset + self.weight)


class Mixer(FusedProjections, Gemma3Attention):
    fused = "qkv_proj"

    def __init__(self, config: Any, number: int) -> None:
        super().__init__(config, number)
        self.scaling = self.head_dim**-0.5
        self.fuse(config)


class Layer(nn.Module):
    def __init__(self, config: Any, number: int) -> None:
        super().__init__()
        self.mixer, self.mlp = Mixer(config, number), Phi3MLP(config)
        self.pre_mixer_norm, self.post_mixer_norm = Norm(config), Norm(config, 1 / 5)
        self.pre_mlp_norm, self.post_mlp_norm = Norm(config), Norm(config, 1 / 5**1.5)

    def forward(self, x: Tensor, **inputs: Any) -> Tensor:
        x = x + self.post_mixer_norm(self.mixer(self.pre_mixer_norm(x), **inputs)[0])
        return x + self.post_mlp_norm(self.mlp(self.pre_mlp_norm(x)))


class Layers(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(config, number) for number in range(config.num_hidden_layers))

    def __getitem__(self, part: Any) -> Any:
        return self.layers[part]

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self.layers)


class Plamo3ForCausalLM(Gemma3ForCausalLM):
    config_class: ClassVar = Plamo3Config

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.embed_tokens.embed_scale.fill_(1.0)
        self.model.layers = Layers(config)
        self.post_init()
