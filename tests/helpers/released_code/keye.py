"""Keye-VL and Keye-VL 1.5 after vLLM's `keye` and `keye_vl1_5`: transformers' PaddleOCR-VL, which has their encoder,
with Qwen3."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PaddleOCRVLModel, Qwen3Config
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.paddleocr_vl.configuration_paddleocr_vl import PaddleOCRVisionConfig, PaddleOCRVLConfig
from transformers.models.paddleocr_vl.modeling_paddleocr_vl import (
    PaddleOCRProjector,
    PaddleOCRRotaryEmbedding,
    PaddleOCRVisionModel,
    PaddleOCRVLPreTrainedModel,
)
from transformers.models.qwen3.modeling_qwen3 import Qwen3Model


class KeyeConfig(PaddleOCRVLConfig):
    model_type = "Keye"
    sub_configs_defaults: ClassVar[dict[str, Any]] = {
        "vision_config": PaddleOCRVisionConfig,
        "text_config": Qwen3Config,
    }

    tie_word_embeddings: bool = False


class Model(PaddleOCRVLModel):
    def __init__(self, config: KeyeConfig, projector: type[nn.Module]) -> None:
        PaddleOCRVLPreTrainedModel.__init__(self, config)
        self.visual = PaddleOCRVisionModel._from_config(config.vision_config)
        self.language_model = Qwen3Model._from_config(config.text_config)
        self.language_model.rotary_emb = PaddleOCRRotaryEmbedding(config.text_config)
        self.projector = projector(config)
        self.rope_deltas = None


class KeyeForConditionalGeneration(PaddleOCRVLPreTrainedModel, GenerationMixin):
    """Has the modules of the model that it runs, under the names of releases."""

    config_class = KeyeConfig
    projector: ClassVar[type[nn.Module]] = PaddleOCRProjector
    _tied_weights_keys: ClassVar[dict[str, str]] = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: KeyeConfig) -> None:
        super().__init__(config)
        whole = Model(config, self.projector)
        self.visual, self.mlp_AR, self.model = whole.visual, whole.projector, whole.language_model
        self.lm_head = nn.Linear(config.text_config.hidden_size, config.text_config.vocab_size, bias=False)
        vars(self)["whole"] = whole  # no module of its own
        self.post_init()

    def forward(self, input_ids: Tensor, **features: Any) -> CausalLMOutputWithPast:
        return CausalLMOutputWithPast(logits=self.lm_head(self.whole(input_ids, **features).last_hidden_state))


class JoinedFirst(nn.Module):
    """The projector of Keye-VL 1.5: the norm follows the joining of patches."""

    def __init__(self, config: KeyeConfig) -> None:
        super().__init__()
        vision = config.vision_config
        self.side = vision.spatial_merge_size
        joined = vision.hidden_size * self.side**2
        self.pre_norm = nn.LayerNorm(joined, 1e-5)
        self.linear_1, self.linear_2 = nn.Linear(joined, joined), nn.Linear(joined, config.text_config.hidden_size)

    def forward(self, x_PD: Tensor, grids: Tensor) -> Tensor:
        s, out = self.side, []
        for x, (t, h, w) in zip(x_PD.split(grids.prod(dim=1).tolist()), grids.tolist(), strict=True):
            squares = x.reshape(t, h // s, s, w // s, s, -1).transpose(2, 3).reshape(-1, s * s * x.shape[-1])
            out.append(self.linear_2(nn.functional.gelu(self.linear_1(self.pre_norm(squares)))))
        return torch.cat(out)


class KeyeVL1_5Config(KeyeConfig):
    model_type = "KeyeVL1_5"


class KeyeVL1_5ForConditionalGeneration(KeyeForConditionalGeneration):
    config_class = KeyeVL1_5Config
    projector = JoinedFirst
