"""How transformers has the model of a source: its type, config, class and the names of its tensors."""

import re
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from tpuconv.errors import ConfigError, UnsupportedConfig
from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.heads import HIDDEN, LOGITS, POOLED_TYPES, REWARD_MODELS, SCORES, TOKEN_SCORES, class_of
from tpuconv.models.registry import find_family, type_of_family
from tpuconv.models.tokenizer import added_token, tokenizer_file
from tpuconv.models.towers.parakeet.released import NEMOTRON_OMNI_TYPES
from tpuconv.models.towers.phi4.released import RELEASED_PARTS
from tpuconv.notation.segments import KEY_MAPPING, undressed
from tpuconv.sources.config import read_json
from tpuconv.sources.files import CONFIG_FILE

LIKE_INTERNVL_CHAT = ("internvl_chat", "skywork_chat", "h2ovl_chat")
READ_AS = {
    **{"kimi_k2": "deepseek_v3", "mimo": "qwen2", "llama_bidirec": "llama"},
    **{"phi4mm": "phi4_multimodal", "deepseek_vl_v2": "deepseek_ocr2"},
    "deepseek_ocr": "unlimited_ocr",
    **dict.fromkeys(LIKE_INTERNVL_CHAT, "qianfan_ocr"),
    **dict.fromkeys(NEMOTRON_OMNI_TYPES, "nemotron_h_omni"),
    **{"interns1": "internvl", "intern_s2_preview": "qwen3_5_moe", "interns2_preview_text": "qwen3_5_moe_text"},
}
"""Model types for which transformers has no class of its own (it would need remote code), and the model type with the
same mathematics that is used instead."""

READ_WITH: Mapping[str, Mapping[str, Any]] = {"llama_bidirec": {"is_causal": False}}
"""Keys of config.json that say to transformers what some of these types are."""

READ_WITHOUT_WINDOW = frozenset({"deepseek_ocr"})
"""Types among them whose layers have no window, which layers of the other type have."""

NAMED_OTHERWISE: Mapping[str, Mapping[str, str]] = {
    "phi4mm": RELEASED_PARTS,
    **{kind: {f".attention.{x}_norm.": f".attn.{x}_norm." for x in "qk"} for kind in LIKE_INTERNVL_CHAT},
}
"""For some of these types parts of the names of the other one, and what the tensors of releases have in their place."""

READ_WITHIN: Mapping[str, tuple[str, Mapping[str, int]]] = {
    "step3p5": ("step3p7", {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "image_size": 28})
}
"""Model types that transformers has as text models of multimodal ones alone: the type of that, and the `vision_config`
of a small one. What sees is not used."""

SEES_BY_TIMM = frozenset({"gemma3n", "perception_lm", "fast_vlm"})
"""Multimodal model types whose encoders of images transformers has of the package timm. Without it the text model is
read by itself."""


EMBEDS_PLACEHOLDERS = frozenset({"diffusion_gemma"})
"""Multimodal model types in which transformers embeds placeholders before it puts features in their place."""


def unreadable(config: DecoderConfig) -> str:
    """Returns why transformers cannot read the encoders of a model with this config here; empty where it can."""
    from transformers.utils import is_timm_available

    kind = getattr(config, "wrapper_type", "") or config.model_type  # of a text model inside another one
    if kind in EMBEDS_PLACEHOLDERS and any(own.placeholder >= config.vocab_size for own in config.parts.values()):
        return "transformers embeds the placeholder of images, which is no token of the vocabulary"
    is_known = kind not in SEES_BY_TIMM or is_timm_available()
    return "" if is_known else "transformers needs the packages timm and torchvision to read its encoder of images"


READ_WHOLE = frozenset({"emu3"})
"""Multimodal model types whose causal model in transformers does not read the names of the complete model."""


def whole_config(raw: Mapping[str, Any]) -> Any:
    """Returns transformers' config object of the multimodal model around the text model of a parsed config.json whose
    type is one of `READ_WITHIN`."""
    from transformers import AutoConfig

    whole, vision = READ_WITHIN[raw["model_type"]]
    tied = raw.get("tie_word_embeddings", False)
    text = {key: value for key, value in raw.items() if key not in ("model_type", "auto_map", "architectures")}
    return AutoConfig.for_model(whole, text_config=text, vision_config=dict(vision), tie_word_embeddings=tied)


def _read_as(part: Any) -> Any:
    """Returns the config of a part under the `model_type` by which transformers finds its class and the names of its
    tensors."""
    if not isinstance(part, Mapping) or part.get("model_type") not in READ_AS:
        return part
    return {**part, "model_type": READ_AS[part["model_type"]]}


def reference_config(source: Path, *, sees: bool = False) -> Any:
    """Returns transformers' config object of the source, from which a model that `sees` can be made.

    Raises:
        UnsupportedConfig: transformers does not know the type of the model.
    """
    import transformers
    from transformers import CONFIG_MAPPING, AutoConfig

    raw = read_json(source / CONFIG_FILE, ConfigError)
    if raw.get("model_type") in READ_WITHIN:
        return whole_config(raw)
    kind = type_of_family({"model_type": "", **raw})
    if (other := READ_AS.get(kind, kind if kind != raw.get("model_type") else None)) is None:
        if kind not in CONFIG_MAPPING:
            raise UnsupportedConfig(
                f"transformers {transformers.__version__} has no model of type {kind!r} to compare with",
                hint="try another version of transformers, or register the classes of the model there "
                "(docs/families.md#a-family-of-another-package); `tpuconv verify` alone compares with the checksums",
            )
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
        if config.model_type in SEES_BY_TIMM and not sees:
            config.text_config.tie_word_embeddings = config.tie_word_embeddings
            return config.text_config
        return getattr(config, "thinker_config", config)  # the model of which returns logits; that around it speaks
    family = find_family(raw)
    around = {k: v for k, v in family.config.around_text(raw).items() if k not in ("model_type", "auto_map")}
    for token in (each.placeholder_token for each in family.modalities if each.placeholder_token):
        around["image_token_id"] = added_token(token, partial(tokenizer_file, source))
    around |= READ_WITH.get(kind, {})
    pooled = {"pooling": around.get("pooling", "avg"), "divided_by": around.get("temperature", 1.0)}
    config = AutoConfig.for_model(other, **{key: _read_as(part) for key, part in around.items()})
    if kind in POOLED_TYPES:
        config.update(pooled)  # transformers has another meaning of `temperature`
    if kind in READ_WITHOUT_WINDOW:
        config.text_config.layer_types = ["full_attention"] * config.text_config.num_hidden_layers
    return config


def released_names(source: Path, tensors: Collection[str], *, sees: bool = True) -> dict[str, str] | None:
    """Returns the patterns in names of a source's `tensors` that transformers is to replace, for its `key_mapping`:
    segments of trainers, other names of encoders, and what stands before a text model that is read without them. None
    if there are none."""
    found = dict(KEY_MAPPING) if any(undressed(name) != name for name in tensors) else {}
    kind = type_of_family({"model_type": "", **read_json(source / CONFIG_FILE, ConfigError)})
    parts = NAMED_OTHERWISE.get(kind, {})
    if kind in SEES_BY_TIMM and not sees:
        found |= {r"^model\.language_model\.": "model."}
    return found | {re.escape(other): name for name, other in parts.items()} or None


def reward_class(auto: Any, config: Any) -> Any:
    """Returns transformers' class of classifiers for a config of Qwen2.5-Math's reward models, whose scores are of an
    MLP: their own code has one."""
    import torch

    class RewardModel(auto._model_mapping[type(config)]):  # type: ignore[misc]
        def __init__(self, config: Any):
            _, config.num_labels = REWARD_MODELS[config.architectures[0]]
            super().__init__(config)
            layers = torch.nn.Linear(config.hidden_size, config.hidden_size), torch.nn.ReLU()
            self.score = torch.nn.Sequential(*layers, torch.nn.Linear(config.hidden_size, config.num_labels))

    return RewardModel


def pooling_class(auto: Any, config: Any) -> Any:
    """Returns transformers' class of classifiers for a config of NVIDIA's rerankers, which score the mean of the hidden
    states of a text, or one of them: their own code has one. It takes one text, without padding."""
    from types import SimpleNamespace

    class Reranker(auto._model_mapping[type(config)]):  # type: ignore[misc]
        def forward(self, input_ids: Any) -> Any:
            states = self.model(input_ids).last_hidden_state
            pooled = {"avg": states.mean(dim=1), "cls": states[:, 0], "last": states[:, -1]}[self.config.pooling]
            return SimpleNamespace(logits=self.score(pooled) / self.config.divided_by)

    return Reranker


def reference_class(config: Any, returns: str = LOGITS, *, sees: bool = False) -> Any:
    """Returns transformers' class of automatic models that has a model for a config that returns this
    (`tpuconv.models.common.heads`). For logits it is the class of causal models; of multimodal models it is mostly
    another one, and always if the model `sees`."""
    import transformers
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_MULTIMODAL_LM_MAPPING,
        AutoModel,
        AutoModelForCausalLM,
        AutoModelForMultimodalLM,
        AutoModelForSequenceClassification,
        AutoModelForTokenClassification,
    )

    if returns:
        classes = {SCORES: AutoModelForSequenceClassification, TOKEN_SCORES: AutoModelForTokenClassification}
        found = {**classes, HIDDEN: AutoModel}[returns]
        is_reward_model = any(name in REWARD_MODELS for name in config.architectures or ())
        is_pooled = returns == SCORES and hasattr(config, "divided_by")
        return reward_class(found, config) if is_reward_model else pooling_class(found, config) if is_pooled else found
    if sees and type(config) in MODEL_FOR_MULTIMODAL_LM_MAPPING:
        return AutoModelForMultimodalLM
    is_causal = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING and config.model_type not in READ_WHOLE
    if is_causal:
        return AutoModelForCausalLM
    # transformers 5.24 lists some models that hear for none of its tasks.
    known = type(config) in MODEL_FOR_MULTIMODAL_LM_MAPPING
    return AutoModelForMultimodalLM if known else getattr(transformers, class_of(config.architectures[0]))
