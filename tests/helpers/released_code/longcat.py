"""LongCat-Flash-Lite after the formulas of `modeling_longcat_ngram.py` of its release: transformers' LongCat-Flash,
whose embedding of a token is the mean of its own vector and of vectors for the n-grams that end with it."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import DynamicCache, LongcatFlashConfig, LongcatFlashForCausalLM
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping

register_checkpoint_conversion_mapping("longcat_flash_ngram", get_checkpoint_conversion_mapping("longcat_flash"))


class LongcatFlashNgramConfig(LongcatFlashConfig):
    model_type = "longcat_flash_ngram"

    ngram_vocab_size_ratio: float | None = None
    emb_neighbor_num: int | None = None
    emb_split_num: int | None = None


class NgramEmbedding(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.splits = config, config.emb_split_num
        tables = self.splits * (config.emb_neighbor_num - 1)
        width, size = config.hidden_size // tables, config.ngram_vocab_size_ratio * config.vocab_size
        self.rows = [int(size + 2 * number + 1) for number in range(tables)]
        self.embedders = nn.ModuleList(nn.Embedding(rows, width) for rows in self.rows)
        self.post_projs = nn.ModuleList(nn.Linear(width, config.hidden_size, bias=False) for _ in self.rows)

    def number(self, text: list[int], length: int, rows: int) -> int:
        """Of the n-gram of this length that ends with the last token of a text, in a table with these rows."""
        total = 0
        for back, token in enumerate(reversed(text[-length:])):
            if back and token == self.config.eos_token_id:
                break
            total += token * (self.config.vocab_size**back % rows)
        return total % rows

    def forward(self, vectors: Tensor, texts: list[list[int]], kept: Tensor) -> Tensor:
        """Of the last tokens of texts, as many as `kept` [B, T] has: padding is left as it is."""
        out = vectors.clone()
        for row, text in enumerate(texts):
            columns = kept[row].nonzero()[:, 0].tolist()
            for column, end in zip(columns, range(len(text) - len(columns) + 1, len(text) + 1), strict=True):
                for number, rows in enumerate(self.rows):
                    found = self.number(text[:end], 2 + number // self.splits, rows)
                    out[row, column] += self.post_projs[number](self.embedders[number].weight[found])
        return out / (1 + len(self.rows))


class LongcatFlashNgramForCausalLM(LongcatFlashForCausalLM):
    config_class: ClassVar = LongcatFlashNgramConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        if config.emb_neighbor_num is not None:
            self.model.ngram_embeddings = NgramEmbedding(config)
        self.post_init()

    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, cache: Any = None, **inputs: Any
    ) -> Any:
        if input_ids is None or self.config.emb_neighbor_num is None:
            return super().forward(input_ids, attention_mask, cache=cache, **inputs)
        cache = DynamicCache(config=self.config) if cache is None else cache
        kept = torch.ones_like(input_ids) if attention_mask is None else attention_mask[:, -input_ids.shape[1] :]
        before = getattr(cache, "texts", [[] for _ in input_ids])
        cache.texts = [text + ids[mask > 0].tolist() for text, ids, mask in zip(before, input_ids, kept, strict=True)]
        vectors = self.model.ngram_embeddings(self.model.embed_tokens(input_ids), cache.texts, kept)
        return super().forward(None, attention_mask, inputs_embeds=vectors, cache=cache, **inputs)
