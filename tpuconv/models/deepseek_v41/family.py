"""DeepSeek V4.1, text: config and mapping table."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import ClassVar, Self

import numpy as np

from tpuconv.errors import ConfigError
from tpuconv.models.common.config import MOST_OF_A_NUMBER, MOST_OF_A_SIZE
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.ngram_hash import LARGEST_INT64, MOST_HASHES, SEED_STEP, NGramHash, primes
from tpuconv.models.common.rope import Rope
from tpuconv.models.common.rows import FURTHER_TOKENS
from tpuconv.models.common.wrapper import BRINGS, SEES, WrapperConfig
from tpuconv.models.deepseek_v4.family import LAYER_ROWS, StreamsConfig
from tpuconv.models.deepseek_v41.token_ids import joined_ids
from tpuconv.models.registry import family
from tpuconv.models.tokenizer import TOKENIZER_FILE
from tpuconv.notation.letters import Word, declare
from tpuconv.notation.table import Map, MappingTable, under

declare(
    entry_layers=Word("layers that make compressed keys, which later layers read too"),
    pooled_layers=Word("layers of these whose keys are made of several tokens"),
    selecting_layers=Word("layers that select compressed keys, for later layers too"),
    ngrams=Word("vectors of a table of n-grams"),
    engram_dim=Word("elements of such a vector", as_="F"),  # the number of vectors has few divisors
    pool_keys=Word("tokens of which the next compressed key is made"),
)

RATIOS_OF_RELEASE = (*[0] * 2, *[2] * 18, *[1] * 20)


@family_config
class Config(WrapperConfig, StreamsConfig):
    """The keys of `text_config`, which may stand at the root. Defaults are the values of the release. Numbers of layers
    that the model does not have are passed over, as in its first layers alone.

    `joined` is not a key: for each token the number of the tokens that n-grams do not tell apart, 4 bytes each, which
    `with_files` computes of the tokenizer. It is empty where all tokens are told apart, and in a model without
    weights."""

    model_type: ClassVar[str] = "deepseek_v41"
    flat: ClassVar[bool] = True
    only: ClassVar = {**StreamsConfig.only, "gate_temp": (1.0,), "tie_word_embeddings": (False,)}
    least: ClassVar = {"num_experts_per_tok": 2, "candidate_source_layer_id": -1, "engram_pad_token_id": 0}
    most: ClassVar = {"engram_vocab_size": 1 << 30, "engram_max_ngram_size": 64, "engram_n_heads": MOST_HASHES}
    derived: ClassVar[frozenset[str]] = StreamsConfig.derived | {"joined"}
    left_out: ClassVar[frozenset[str]] = frozenset(
        {
            *("num_nextn_predict_layers", "dspark_block_size", "dspark_noise_token_id", "dspark_target_layer_ids"),
            *("dspark_markov_rank", "dspark_n_routed_experts", "dspark_num_experts_per_tok"),
        }
    )

    vocab_size: int = 129280
    hidden_size: int = 5120
    intermediate_size: int = 2304
    num_hidden_layers: int = 40
    num_attention_heads: int = 64
    num_key_value_heads: int | None = 1
    head_dim: int = 512
    qk_rope_head_dim: int | None = 64
    max_position_embeddings: int = 1048576
    rms_norm_eps: float = 1e-20
    tie_word_embeddings: bool = False
    q_lora_rank: int = 1280
    n_routed_experts: int = 384
    num_experts_per_tok: int = 6
    routed_scaling_factor: float = 1.5
    swiglu_limit: float = 10.0
    sliding_window: int = 128
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    o_groups: int = 8
    o_lora_rank: int = 1024
    index_n_heads: int = 32
    index_head_dim: int = 128
    index_topk: int = 512
    compress_ratios: tuple[int, ...] = RATIOS_OF_RELEASE
    kv_source_layer_ids: tuple[int, ...] = (2, 8, 14, 20)
    index_source_layer_ids: tuple[int, ...] = (2, 8, 14, 20, 24, 28, 32, 36)
    candidate_source_layer_id: int = 20
    candidate_topk_blocks: int = 2048
    candidate_block_size: int = 8
    engram_layer_ids: tuple[int, ...] = (1, 14)
    engram_num_embeddings: tuple[int, ...] = (384006168, 384016682)
    engram_max_ngram_size: int = 4
    engram_vocab_size: int = 16000000
    engram_n_heads: int = 8
    engram_head_dim: int = 256
    engram_pad_token_id: int = 2
    engram_compressed_vocab_size: int = 99092
    joined: bytes = b""

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.swiglu_limit <= 0:
            yield f"swiglu_limit={self.swiglu_limit} is not positive"
        if len(self.compress_ratios) < self.num_hidden_layers:
            count = len(self.compress_ratios)
            yield f"compress_ratios has {count} numbers for {self.num_hidden_layers} layers"
        elif wrong := [ratio for ratio in self.compress_ratios if not 0 <= ratio <= MOST_OF_A_NUMBER]:
            yield f"compress_ratios has {wrong[0]}, not 0 to {MOST_OF_A_NUMBER}"
        else:
            yield from self._faults_of_sources()
        if len(self.engram_num_embeddings) != len(self.engram_layer_ids):
            yield "engram_num_embeddings has not one number for each layer of engram_layer_ids"
        elif self.ngram_layers:
            yield from self._faults_of_ngrams()

    def _faults_of_sources(self) -> Iterator[str]:
        candidates = self.candidate_source_layer_id
        for key in ("kv_source_layer_ids", "index_source_layer_ids", "engram_layer_ids"):
            if list(layers := getattr(self, key)) != sorted(set(layers)) or min(layers, default=0) < 0:
                yield f"{key} are not numbers of layers in their order"
                return
        if alone := set(self.entry_layers) - set(self.selecting_layers):
            yield f"index_source_layer_ids lacks layer {min(alone)} of kv_source_layer_ids"
        for layer in range(self.num_hidden_layers):
            ratio, source = self.compress_ratios[layer], self.entries_of(layer)
            if not ratio and layer in self.selecting_layers:
                yield f"compress_ratios is 0 for layer {layer}, which makes or selects compressed keys"
            elif ratio and (source is None or self.compress_ratios[source] != ratio):
                yield f"layer {layer} has no layer of kv_source_layer_ids with the same compress_ratios before it"
        if candidates not in range(self.num_hidden_layers):
            return
        if candidates not in self.selecting_layers:
            yield f"candidate_source_layer_id={candidates} is not in index_source_layer_ids"
        elif {self.compress_ratios[layer] for layer in self.selecting_layers if layer >= candidates} != {
            self.compress_ratios[candidates]
        }:
            yield f"layers after candidate_source_layer_id={candidates} have other compress_ratios"
        if (self.candidate_topk_blocks - 1) * self.candidate_block_size + 1 < self.index_topk:
            yield f"candidate_topk_blocks={self.candidate_topk_blocks} may hold fewer keys than index_topk"

    def _faults_of_ngrams(self) -> Iterator[str]:
        hashes = self.hashes * len(self.engram_layer_ids)
        if self.engram_max_ngram_size < 2:
            yield f"engram_max_ngram_size={self.engram_max_ngram_size} is less than 2"
        elif self.engram_pad_token_id >= self.vocab_size:
            yield f"engram_pad_token_id={self.engram_pad_token_id} is not in the vocabulary"
        elif hashes > MOST_HASHES:
            yield f"engram_layer_ids needs more than {MOST_HASHES} hashes of n-grams"
        else:
            for layer, rows in zip(self.engram_layer_ids, self.engram_num_embeddings, strict=True):
                if rows > MOST_OF_A_SIZE:
                    yield f"engram_num_embeddings={rows} is more than {MOST_OF_A_SIZE}"
                need = self.hashes * self.engram_vocab_size  # at least
                need = need if need > rows else sum(self.ngram_hash(layer).sizes)
                if need > rows:
                    yield f"engram_num_embeddings={rows} of layer {layer} is less than the {need} hashes of its n-grams"

    def with_files(self, read: Callable[[str], bytes | None]) -> Self:
        """Returns this config with the numbers of tokens that n-grams do not tell apart, of tokenizer.json.

        Raises:
            ConfigError: there is none, or their number is not `engram_compressed_vocab_size`.
        """
        if not self.ngram_layers or self.engram_compressed_vocab_size == self.vocab_size:
            return self
        if (contents := read(TOKENIZER_FILE)) is None:
            raise ConfigError(
                f"{TOKENIZER_FILE} is missing, which numbers the tokens of n-grams",
                hint="copy it from the release into the folder, and take it into the manifest by `tpuconv verify "
                "--update`",
            )
        joined = joined_ids(contents, self.vocab_size, self.engram_compressed_vocab_size)
        return replace(self, joined=joined)

    @property
    def entry_layers(self) -> tuple[int, ...]:
        """The layers that make compressed keys."""
        return tuple(layer for layer in self.kv_source_layer_ids if layer < self.num_hidden_layers)

    @property
    def selecting_layers(self) -> tuple[int, ...]:
        """The layers that select compressed keys."""
        return tuple(layer for layer in self.index_source_layer_ids if layer < self.num_hidden_layers)

    @property
    def ngram_layers(self) -> tuple[int, ...]:
        """The layers that read a table of n-grams."""
        return tuple(layer for layer in self.engram_layer_ids if layer < self.num_hidden_layers)

    def entries_of(self, layer: int) -> int | None:
        """Returns the layer whose compressed keys a layer reads, the last one that makes some; None if none does."""
        return max((source for source in self.entry_layers if source <= layer), default=None)

    @property
    def hashes(self) -> int:
        """The number of hashes of n-grams of a layer."""
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads

    def ngram_hash(self, layer: int) -> NGramHash:
        """Returns how the n-grams of a layer are numbered, as `engram.py` of the release does."""
        place = self.engram_layer_ids.index(layer)
        sizes = primes(self.engram_vocab_size, (place + 1) * self.hashes)[place * self.hashes :]
        half = max(1, LARGEST_INT64 // self.engram_compressed_vocab_size // 2)
        draws = np.random.default_rng(SEED_STEP * layer).integers(0, half, self.engram_max_ngram_size, np.int64)
        starts = (0, *accumulate(sizes))[:-1]
        rows = self.engram_num_embeddings[place]
        return NGramHash(tuple(2 * int(draw) + 1 for draw in draws), sizes, starts, rows)

    @property
    def pad_number(self) -> int:
        """The number that stands in n-grams for tokens before the first one."""
        pad = self.engram_pad_token_id
        return int(np.frombuffer(self.joined, np.int32)[pad]) if self.joined else pad

    @property
    def sizes(self) -> dict[str, int]:
        return {
            **super().sizes,
            "ngrams": max(self.engram_num_embeddings, default=0),
            "engram_dim": self.engram_head_dim,
            "ngram_width": self.hashes * self.engram_head_dim,
            "ngram_tokens": self.engram_max_ngram_size - 1,
        }

    @property
    def layer_sizes(self) -> Mapping[int, Mapping[str, int]]:
        rows = zip(self.engram_layer_ids, self.engram_num_embeddings, strict=True)
        return {layer: {"ngrams": count} for layer, count in rows if layer < self.num_hidden_layers}

    @property
    def layer_sets(self) -> dict[str, Sequence[int]]:
        return {
            **super().layer_sets,
            "entry_layers": self.entry_layers,
            "pooled_layers": tuple(layer for layer in self.entry_layers if self.compress_ratios[layer] > 1),
            "selecting_layers": self.selecting_layers,
            "ngram_layers": self.ngram_layers,
        }

    @property
    def ropes(self) -> tuple[Rope | None, ...]:
        ratios = self.compress_ratios[: self.num_hidden_layers]
        return tuple(self.compress_rope if ratio else self.rope for ratio in ratios)

    @property
    def horizons(self) -> frozenset[int]:
        selected = {self.index_topk * self.compress_ratios[layer] for layer in self.selecting_layers}
        if (source := self.candidate_source_layer_id) in self.selecting_layers:
            selected |= {self.candidate_topk_blocks * self.candidate_block_size * self.compress_ratios[source]}
        return super().horizons | selected

    @property
    def unscannable(self) -> str:
        return "layers read the compressed keys of earlier ones"

    @property
    def inseparable(self) -> str:
        return "layers pass on several residual streams and compressed keys, and some read the ids of tokens"


ENGRAM_ROWS = (
    Map("embed.weight", "table.embedding", "ngrams engram_dim"),
    Map(
        "wkv.weight",
        ("key.kernel", "value.kernel"),
        "((streams D) + D) ngram_width -> ngram_width streams D, ngram_width D",
    ),
    Map("q_weight", "query_norm.scale", "streams D"),
    Map("k_weight", "key_norm.scale", "streams D"),
)

V41_OUTSIDE = {
    **{f"{name}.*": why for name, why in {"vision": SEES, "aligner": BRINGS}.items()},
    **dict.fromkeys(("image_start", "image_end", "image_newline", "image_pad"), BRINGS),
    "layers.{L}.ffn.gate.bias_vl": "routers of the tokens of images: the text model alone is converted",
    "mtp.*": FURTHER_TOKENS,
}

TABLE = MappingTable(
    (
        Map("embed.weight", "embed.embedding", "V D"),
        *under("layers.{L}", "layers.{L}", *LAYER_ROWS),
        Map("layers.{L}.ffn.gate.bias", "layers.{L}.moe.correction", "E", buffer=True),
        *under(
            "layers.{entry_layers}.attn",
            "layers.{entry_layers}.attn",
            Map("compressor.wkv.weight", "compressor.kv.kernel", "H D -> D H"),
            Map("compressor.norm.weight", "compressor.norm.scale", "H"),
            Map("indexer.wk.weight", "indexer.k.kernel", "index_dim H -> H index_dim"),
            Map("indexer.k_norm.weight", "indexer.k_norm.scale", "index_dim"),
        ),
        Map(
            "layers.{pooled_layers}.attn.compressor.wgate.weight",
            "layers.{pooled_layers}.attn.compressor.gate.kernel",
            "H D -> D H",
        ),
        *under(
            "layers.{selecting_layers}.attn.indexer",
            "layers.{selecting_layers}.attn.indexer",
            Map("wq_b.weight", "q.kernel", "(index_heads index_dim) Q -> Q index_heads index_dim"),
            Map("weights_proj.weight", "router.kernel", "index_heads D -> D index_heads"),
        ),
        *under("layers.{ngram_layers}.engram", "layers.{ngram_layers}.engram", *ENGRAM_ROWS),
        Map("norm.weight", "norm.scale", "D"),
        Map("head.weight", "lm_head.kernel", "V D -> D V", when="has_lm_head"),
    ),
    ignore=V41_OUTSIDE,
)

FAMILY = family(
    Config,
    TABLE,
    "DeepSeek V4.1",
    "DeepseekV41ForCausalLM",
    types={"DeepseekV41TextForCausalLM": "deepseek_v41_text"},
)
