"""Tiny multimodal models that servers load, with a tokenizer, the files of a processor and images, of sizes that no
processor changes: servers and transformers resize images by different programs."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image

from helpers.consumers import BASE
from helpers.processors import IMAGE_PROCESSORS, word_tokenizer
from helpers.sights import END, IMAGE, START, tiny

VIDEO = 92
TEXT = {**BASE, "vocab_size": 97, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
"""Of `BASE`, with the widths of its rules."""
QWEN_TOKENS = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
}


@dataclass(frozen=True)
class ServedSight:
    """A multimodal model.

    Attributes:
        model: makes it, of transformers.
        tokens: special tokens by their names in the tokenizer's config.
        words: of the vocabulary, by their ids, besides `t5` for 5.
        marker: of an image in a prompt.
        sizes: rows and columns of its images.
        processor: makes the processor of images.
        processor_config: the other keys of a processor.
        has_causal_images: whether vLLM's build for CPUs masks images causally, which the model does not.
    """

    model: Callable[[], Any]
    tokens: Mapping[str, str]
    words: Mapping[int, str]
    marker: str
    sizes: tuple[tuple[int, int], ...]
    processor: Callable[[], Any]
    processor_config: Mapping[str, Any]
    has_causal_images: bool = False

    @property
    def prompt(self) -> str:
        """Texts around the images."""
        return " ".join(["t5", *(f"{self.marker} t{8 - n}" for n in range(len(self.sizes)))])

    def save(self, folder: Path) -> list[str]:
        """Writes the model and its images; returns the files of these."""
        self.model().to(torch.bfloat16).save_pretrained(folder)
        word_tokenizer(self.words, pad_token="t0", extra_special_tokens=dict(self.tokens)).save_pretrained(folder)
        self.processor().save_pretrained(folder)
        (folder / "processor_config.json").write_text(json.dumps(dict(self.processor_config)))
        rng, files = np.random.default_rng(0), []
        for number, size in enumerate(self.sizes):
            files.append(str(folder.parent / f"{number}.png"))
            Image.fromarray(rng.integers(0, 255, (*size, 3), dtype=np.uint8)).save(files[-1])
        return files


def features_of(folder: Path, images: Sequence[str]) -> dict[str, np.ndarray]:
    """What the processor of a folder makes of images."""
    made = transformers.AutoImageProcessor.from_pretrained(folder)(
        images=[Image.open(path).convert("RGB") for path in images], return_tensors="np"
    )
    return {name: np.asarray(made[name]) for name in ("pixel_values", "image_grid_thw") if name in made}


def gemma3() -> Any:
    text = {**TEXT, "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
    vision = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.Gemma3Config(
        text_config=text | {"query_pre_attn_scalar": 64, "tie_word_embeddings": True},
        vision_config=vision | {"image_size": 24, "patch_size": 4},
        mm_tokens_per_image=9,
        image_token_index=IMAGE,
        boi_token_index=START,
        eoi_token_index=END,
    )
    return tiny(transformers.Gemma3ForConditionalGeneration, config)


def qwen3_vl() -> Any:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [12, 10, 10], "mrope_interleaved": True}
    vision = {"depth": 3, "hidden_size": 64, "intermediate_size": 96, "num_heads": 2, "patch_size": 4}
    config = transformers.Qwen3VLConfig(
        text_config=TEXT | {"rope_parameters": rope},
        vision_config=vision
        | {"out_hidden_size": 256, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]},
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=END,
    )
    return tiny(transformers.Qwen3VLForConditionalGeneration, config)


SERVED_SIGHTS: Mapping[str, ServedSight] = {
    "gemma3": ServedSight(
        gemma3,
        {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
        {IMAGE: "<image_soft_token>", START: "<start_of_image>", END: "<end_of_image>"}
        | {91 - n: "\n" * (n + 1) for n in range(4)},  # vLLM's processor looks for lines
        "<start_of_image>",
        ((24, 24), (24, 24)),
        IMAGE_PROCESSORS["gemma3"],
        {"processor_class": "Gemma3Processor", "image_seq_length": 9},
        has_causal_images=True,
    ),
    "qwen3_vl": ServedSight(
        qwen3_vl,
        QWEN_TOKENS,
        {IMAGE: "<|image_pad|>", VIDEO: "<|video_pad|>", START: "<|vision_start|>", END: "<|vision_end|>"},
        "<|vision_start|><|image_pad|><|vision_end|>",
        ((32, 40), (48, 16)),
        IMAGE_PROCESSORS["qwen3_vl"],
        {"processor_class": "Qwen3VLProcessor"},
    ),
}
