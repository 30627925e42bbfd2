"""How transformers' models are called as a reference, and where the version that the tests run with differs from what
was released."""

from functools import partial, wraps
from inspect import signature
from types import SimpleNamespace
from typing import Any

from tpuconv.verify.sights import SightWindow


def attention_of(config: Any) -> str:
    """Returns in which of transformers' forms of attention the model of a config is computed. With "eager" transformers
    5.24 adds the biases of Falcon's ALiBi twice: to the scores, and again with the mask."""
    return "sdpa" if config.model_type == "falcon" and config.alibi else "eager"


LEAVES_OUT_FACTORS = ("aya_vision", "cohere2_vision", "granite_speech", "granite_speech_plus", "llava_next")
"""Models whose logits have not the factor of their text model in transformers 5.24. LLaVA-NeXT and Aya Vision had it
until 4.51, and servers have it."""


def mended(model: Any) -> Any:
    """Returns transformers' model, which then computes as it was released: Llama 4's in transformers 5.24 asks its text
    model for images, Hunyuan-VL's numbers images on from text to text of a batch, Unlimited-OCR's takes the numbers of
    tiles as a list alone, BLIP-2's takes no text without images, VibeVoice-ASR's adds random numbers to features, and
    some have not all factors. A call of DiffusionGemma's is one of its encoder. To be called once for a model."""
    if type(model).__name__ == "Llama4ForConditionalGeneration":
        model.language_model.register_forward_hook(_without_images)
    if model.config.model_type == "blip-2":
        model.get_image_features = partial(_of_images_alone, model.get_image_features)
        model.register_forward_pre_hook(_ids_first, with_kwargs=True)
    if model.config.model_type == "unlimited_ocr":
        model.base_model.register_forward_pre_hook(_counts_as_list, with_kwargs=True)
    if model.config.model_type == "vibevoice_asr":
        model.register_forward_pre_hook(_without_noise, with_kwargs=True)
    if model.config.model_type == "hunyuan_vl":
        model.base_model.get_rope_index = partial(_of_each_text, model.base_model.get_rope_index)
    if model.config.model_type == "diffusion_gemma":
        encoder = model.base_model.encoder
        model.create_masks_for_generate = encoder.create_masks_for_generate
        model.denoise, model.forward = model.forward, wraps(encoder.forward)(partial(_of_encoder, model))
    if model.config.model_type in LEAVES_OUT_FACTORS:
        text = model.config.get_text_config()
        factor = getattr(text, "logit_scale", 1.0) / getattr(text, "logits_scaling", 1.0)
        model.get_output_embeddings().register_forward_hook(lambda module, inputs, logits: logits * factor)
    return model


def _of_encoder(model: Any, *inputs: Any, **named: Any) -> Any:
    """Returns the logits of the tokens that DiffusionGemma's encoder reads, which it is trained with too; without a
    head what the encoder returns."""
    import torch

    out = model.base_model.encoder(*inputs, **{name: value for name, value in named.items() if name != "use_cache"})
    if model.base_model is model:
        return out
    cap = model.final_logit_softcapping
    logits = cap * torch.tanh(model.lm_head(out.last_hidden_state).float() / cap)
    return SimpleNamespace(logits=logits, past_key_values=out.cache)


def encoder_in(base: Any) -> Any:
    """Returns the part of transformers' base model that reads texts: of DiffusionGemma's the encoder."""
    return base.encoder if base.config.model_type == "diffusion_gemma" else base


OF_DECODER = r"^model\.decoder\.(?!self_conditioning\.|layers\.\d+\.layer_scalar)"


def encoder_alone(model: Any) -> dict[str, str]:
    """Removes the decoder from transformers' DiffusionGemma, none of whose weights are loaded. Returns the patterns in
    names of what files have of both under the name of the decoder, and what stands in their place; of another model
    none."""
    if model.config.model_type != "diffusion_gemma":
        return {}
    del model.base_model.decoder
    return {OF_DECODER: "model.encoder.language_model."}


def _of_each_text(
    positions: Any, ids_BT: Any, mm_token_type_ids: Any, image_grid_thw: Any, attention_mask: Any
) -> tuple[Any, Any]:
    """Returns rotary positions [A, B, T] and what is added to later ones [B, 1], computed text by text: in servers the
    first image of each text has the number 0."""
    import torch

    is_image_BT = mm_token_type_ids == 1
    images_B = (is_image_BT & ~is_image_BT.roll(1, dims=1)).sum(dim=1)  # the last token is never of an image
    grids = image_grid_thw.split(images_B.tolist())
    each = zip(ids_BT.split(1), mm_token_type_ids.split(1), grids, attention_mask.split(1), strict=True)
    at, deltas = zip(*(positions(*arguments) for arguments in each), strict=True)
    return torch.cat(at, dim=1), torch.cat(deltas)


def _of_images_alone(features_of: Any, pixel_values: Any, **options: Any) -> Any:
    """Returns the features of images; none of none."""
    import torch

    if pixel_values is not None:
        return features_of(pixel_values, **options)
    return SimpleNamespace(pooler_output=torch.zeros(0), qformer_outputs=None, vision_outputs=None)


def _ids_first(module: Any, inputs: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return (), {"pixel_values": None, **dict(zip(("input_ids",), inputs, strict=False)), **named}


def _counts_as_list(module: Any, inputs: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    counts = named.get("num_local_patches")
    return inputs, named if counts is None else {**named, "num_local_patches": counts.tolist()}


def _without_noise(module: Any, inputs: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return inputs, {**named, "sample": False}


def _without_images(module: Any, inputs: Any, outputs: Any) -> None:
    outputs.image_outputs = None


KINDS_OF_TOKENS = {
    "token_type_ids": {"vision": 1},
    "mm_token_type_ids": {"vision": 1, "audio": 3},
    "moe_mm_token_type_ids": {"vision": 1},
}
"""Arguments by which transformers' models tell placeholders from text, and the numbers that processors give them."""

TELLS_PROMPTS = ("paligemma",)
"""Models for which these numbers tell a prompt, all 0, from the text behind it."""

ADDS_FEATURES = ("molmo2",)
"""Models that add features to the embeddings of placeholders."""

ATTENDS_TO_FEATURES = ("mllama",)
"""Models whose layers attend to features, which have no places among the tokens."""

MASKS_OF_GENERATE = ("gemma4_unified", "diffusion_gemma")
"""Models whose tokens of an image see each other in `generate` alone: a call without masks is causal."""


def masks_of_generate(model: Any, mask_BT: Any, **kinds: Any) -> Any:
    """Returns the masks [B, 1, T, T] of each kind of layer that transformers makes while it generates; `kinds` are the
    kinds of tokens, by argument."""
    import torch

    make = model.create_masks_for_generate
    cache = "cache" if "cache" in signature(make).parameters else "past_key_values"  # before transformers 5.24
    inputs = torch.zeros((*mask_BT.shape, 1), dtype=model.dtype)
    return make(model.config, inputs, mask_BT, position_ids=None, **{cache: None}, **kinds)


def inputs_of(model: Any, window: SightWindow) -> dict[str, Any]:
    """Returns the arguments of transformers' model for a prompt with images or sounds."""
    import torch

    known, ids = signature(model.forward).parameters, torch.tensor([list(window.ids)])
    features = {name: torch.tensor(value) for name, value in window.features.items()}
    is_told = ids == (-1 if model.config.model_type in TELLS_PROMPTS else window.placeholder)
    kinds = {name: is_told * numbers.get(window.part, 0) for name, numbers in KINDS_OF_TOKENS.items() if name in known}
    features = {name: value.to(model.dtype) if value.is_floating_point() else value for name, value in features.items()}
    mask = torch.ones_like(ids)  # without one, Qwen-Omni's images have the positions of text
    if model.config.model_type in MASKS_OF_GENERATE:
        mask = masks_of_generate(model, mask, **kinds)
    return {"input_ids": ids, "attention_mask": mask, **kinds, **features}
