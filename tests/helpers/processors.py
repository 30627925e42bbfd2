"""Tokenizers and image processors of tiny multimodal models, as releases have them."""

from collections.abc import Callable, Mapping
from typing import Any

import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

SMALL = {"shortest_edge": 256, "longest_edge": 2048}
"""The fewest and the most pixels of an image."""


def word_tokenizer(words: Mapping[int, str], **options: Any) -> Any:
    """A tokenizer of 97 words: those of `words` by their ids, and `t5` for 5."""
    found = Tokenizer(WordLevel({words.get(i, f"t{i}"): i for i in range(97)}, unk_token="t3"))
    found.pre_tokenizer = WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=found, unk_token="t3", **options)


def qwen_images() -> Any:
    return transformers.Qwen2VLImageProcessor(patch_size=4, merge_size=2, temporal_patch_size=2, size=SMALL)


IMAGE_PROCESSORS: Mapping[str, Callable[[], Any]] = {
    "gemma3": lambda: transformers.Gemma3ImageProcessor(size={"height": 24, "width": 24}),
    "paligemma2": lambda: transformers.SiglipImageProcessor(size={"height": 12, "width": 12}, image_seq_length=9),
    "qwen3_vl": qwen_images,
    "ernie4_5_vl_moe": lambda: transformers.Ernie4_5_VLMoeImageProcessorPil(patch_size=4, merge_size=2, size=SMALL),
    "hunyuan_vl": lambda: transformers.HunYuanVLImageProcessor(patch_size=4, merge_size=2, size=SMALL),
}
"""By the name of the case."""
