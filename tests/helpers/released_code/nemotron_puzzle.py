"""Nemotron-H Puzzle after the code of servers (vLLM, SGLang): Nemotron-H of transformers, whose layers differ in the
width of experts and in how many a token has."""

from copy import copy
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import NemotronHConfig, NemotronHForCausalLM
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMLP, NemotronHMoE


class Config(NemotronHConfig):
    model_type = "nemotron_h_puzzle"

    block_configs: list[dict[str, Any]] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Without the keys that the entries of layers have, as the release."""
        of_layers = {key for block in self.block_configs or () for key in block}
        return {key: value for key, value in super().to_dict().items() if key not in of_layers}


class MoE(NemotronHMoE):
    """The same with a module for each expert, as the release names them."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        inside = copy(config)
        inside.hidden_size, inside.mlp_bias = config.moe_latent_size or config.hidden_size, False
        width, count = config.moe_intermediate_size, config.n_routed_experts
        self.experts = nn.ModuleList(NemotronHMLP(inside, intermediate_size=width) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        _, weights, ids = self.gate(x)
        of_all = torch.zeros(len(ids), len(self.experts)).scatter(-1, ids, weights.float())
        inside = self.fc1_latent_proj(x)
        y = torch.stack([expert(inside) for expert in self.experts], -2)
        y = torch.einsum("bted,bte->btd", y.float(), of_all.unflatten(0, x.shape[:2])).to(x.dtype)
        return self.fc2_latent_proj(y) + self.shared_experts(x)


class NemotronHPuzzleForCausalLM(NemotronHForCausalLM):
    config_class: ClassVar = Config

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for layer, block in zip(self.model.layers, config.block_configs, strict=True):
            if block["block_type"] == "moe":
                own = copy(config)
                vars(own).update(block)
                layer.mixer = MoE(own)
        self.post_init()
