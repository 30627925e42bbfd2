"""Qwen4-Exp, the text model: config and mapping table."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, ClassVar

from tpuconv.models.common.config import MOST_OF_A_SIZE
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.ngram_hash import LARGEST_INT64, MOST_HASHES, SEED_STEP, NGramHash, primes
from tpuconv.models.qwen3_next.qwen3_5 import ATTENTION_OF_BOTH, OUTSIDE_TEXT, SHARED_MOE_ROWS, Qwen35MoeConfig
from tpuconv.models.registry import family
from tpuconv.notation.letters import Word, declare
from tpuconv.notation.table import Map, MappingTable, under

declare(
    stream_rank=Word("rank of the weights of residual streams"),
    ngram_dim=Word("width of the embedding of one n-gram"),
    ngram_parts=Word("parts of a table of n-grams", as_="V"),
    part_ngrams=Word("n-grams of a part of their table"),
)

INDEXED_KINDS = ("indexed_attention", "qwen_sparse_attention")
"""The name that transformers has for the `layer_types` that releases call "full_attention"."""


@family_config
class Config(Qwen35MoeConfig):
    """The keys of config.json. All layers have experts. Layers with full attention have an indexer; those of
    `ple_layer_ids`, which count from 1 and have linear attention, have embeddings of n-grams. transformers has no
    defaults of the indexer's sizes, and no model without them."""

    model_type: ClassVar[str] = "qwen4_exp_text"
    only: ClassVar = {
        "attn_output_gate": (True,),
        "mlp_only_layers": ([], None),
        "output_gate_type": ("silu", "sigmoid", None),
        "indexer_kv_heads": (1, None),
    }
    least: ClassVar[Mapping[str, int]] = {"seed": 0, "eos_token_id": 0, "ngram_size": 2}
    most: ClassVar[Mapping[str, int]] = {"ngram_size": 64, "heads_per_ngram": MOST_HASHES, "split_ngram_parts": 1 << 16}
    nullable: ClassVar[frozenset[str]] = Qwen35MoeConfig.nullable | {
        *("indexer_n_heads", "indexer_head_dim", "indexer_budget", "indexer_compress_ratio"),
    }
    left_out: ClassVar[frozenset[str]] = frozenset({"number_of_conv_states"})

    partial_rotary_factor: float = 1.0
    output_gate_type: str | None
    hc_count: int
    hc_lowrank: int
    indexer_n_heads: int = 4
    indexer_head_dim: int = 256
    indexer_budget: int = 2048
    indexer_compress_ratio: int = 4
    ple_layer_ids: tuple[int, ...] | None
    ple_embed_dim: int | None
    ple_conv_kernel_size: int
    ngram_size: int
    heads_per_ngram: int
    ngram_vocab_size_base: int
    make_ngram_vocab_size_divisible_by: int
    seed: int
    split_ngram_parts: int
    eos_token_id: int | tuple[int, ...] | None = None

    @property
    def placeholder_as(self) -> int | None:
        return None  # the ids of placeholders are parts of n-grams

    @classmethod
    def in_our_keys(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        out = super().in_our_keys(raw)
        if isinstance(kinds := out.get("layer_types"), list):
            out["layer_types"] = ["full_attention" if kind in INDEXED_KINDS else kind for kind in kinds]
        return out

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.hc_count < 2:
            yield f"hc_count={self.hc_count} is less than 2"
        if self.layers_of("full_attention"):
            yield from self._faults_of_indexers()
        if self.ngram_layers:
            yield from self._faults_of_ngrams()

    def _faults_of_indexers(self) -> Iterator[str]:
        budget, ratio = self.indexer_budget, self.indexer_compress_ratio
        if budget % ratio:
            yield f"indexer_budget={budget} is not a multiple of indexer_compress_ratio={ratio}"
        if self.rope_dim > self.indexer_head_dim:
            yield f"indexer_head_dim={self.indexer_head_dim} has no room for {self.rope_dim} rotary dimensions"
        if self.rope.depends_on_length:
            yield f"rotary positions of the type {self.rope.type!r} are not implemented for this indexer"

    def _faults_of_ngrams(self) -> Iterator[str]:
        heads, linear = (self.ngram_size - 1) * self.heads_per_ngram, self.layers_of("linear_attention")
        if other := [layer + 1 for layer in self.ngram_layers if layer not in linear]:
            yield f"ple_layer_ids has {', '.join(map(str, other))}: no layer with linear attention, counted from 1"
        if self.ngram_width % heads:
            yield f"ple_embed_dim={self.ngram_width} is not a multiple of {heads}, the number of hashes of n-grams"
        if self.end_token not in range(self.vocab_size):
            yield f"ple_layer_ids needs an eos_token_id in the vocabulary, not {self.eos_token_id}"
        if heads * len(self.ngram_layers) > MOST_HASHES:
            yield f"ple_layer_ids needs more than {MOST_HASHES} hashes of n-grams"
            return
        rows = [heads * self.ngram_vocab_size_base]  # at least
        if rows[0] <= MOST_OF_A_SIZE:
            rows = sorted({self.ngram_hash(layer).rows for layer in self.ngram_layers})
        if rows[-1] > MOST_OF_A_SIZE:
            yield f"ngram_vocab_size_base={self.ngram_vocab_size_base} gives more than {MOST_OF_A_SIZE} n-grams"
        elif len(rows) > 1:
            yield f"layers with tables of {', '.join(map(str, rows))} n-grams each are not implemented"
        elif rows[0] % self.split_ngram_parts:
            yield f"split_ngram_parts={self.split_ngram_parts} does not divide the {rows[0]} n-grams of a layer"

    @property
    def ngram_layers(self) -> tuple[int, ...]:
        """The layers with embeddings of n-grams."""
        return tuple(layer - 1 for layer in sorted(set(self.ple_layer_ids or ())))

    @property
    def ngram_width(self) -> int:
        """The width of the embeddings of all n-grams of a token."""
        return self.hidden_size if self.ple_embed_dim is None else self.ple_embed_dim

    @property
    def end_token(self) -> int:
        """The token that n-grams do not reach over; -1 if there is none."""
        ends = self.eos_token_id if isinstance(self.eos_token_id, tuple) else (self.eos_token_id,)
        return -1 if not ends or ends[0] is None else ends[0]

    def ngram_hash(self, layer: int) -> NGramHash:
        """Returns how the n-grams of a layer are numbered, as transformers' `Qwen4ExpTextNGramEmbedding` does."""
        place, heads = self.ngram_layers.index(layer), (self.ngram_size - 1) * self.heads_per_ngram
        sizes = primes(self.ngram_vocab_size_base, (place + 1) * heads)[place * heads :]
        starts = (0, *accumulate(sizes))
        padding = -starts[-1] % self.make_ngram_vocab_size_divisible_by
        half = max(1, LARGEST_INT64 // self.vocab_size // 2)
        first = self.seed + SEED_STEP * place
        draws = (_split_mix(first + GAMMA * (token + 1)) for token in range(self.ngram_size))
        return NGramHash(tuple(2 * (draw % half) + 1 for draw in draws), sizes, starts[:-1], starts[-1] + padding)

    @property
    def sizes(self) -> dict[str, int]:
        heads = (self.ngram_size - 1) * self.heads_per_ngram
        rows = self.ngram_hash(self.ngram_layers[0]).rows if self.ngram_layers else 0
        return {
            **super().sizes,
            "index_heads": self.indexer_n_heads,
            "index_dim": self.indexer_head_dim,
            "streams": self.hc_count,
            "streams_out": self.hc_count,
            "stream_rank": self.hc_lowrank,
            "ngram_width": self.ngram_width,
            "ngram_dim": self.ngram_width // heads,
            "ngram_taps": self.ple_conv_kernel_size,
            "ngram_parts": self.split_ngram_parts,
            "part_ngrams": rows // self.split_ngram_parts,
        }

    @property
    def layer_sets(self) -> dict[str, Sequence[int]]:
        return {**super().layer_sets, "ngram_layers": self.ngram_layers}

    @property
    def horizons(self) -> frozenset[int]:
        selected = {self.indexer_budget} if self.layers_of("full_attention") else set()
        return super().horizons | selected

    @property
    def unscannable(self) -> str:
        return "some of its layers number n-grams in ways of their own" if self.ngram_layers else super().unscannable

    @property
    def inseparable(self) -> str:
        return "some of its layers read the ids of tokens" if self.ngram_layers else ""


ALL_BITS = (1 << 64) - 1
"""By which the seeds of layers differ."""
GAMMA = 0x9E3779B97F4A7C15


def _split_mix(value: int) -> int:
    """Returns the output of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) for a state plus `GAMMA`."""
    value = (value + GAMMA) & ALL_BITS
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & ALL_BITS
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & ALL_BITS
    return value ^ (value >> 31)


MIXER_ROWS = (
    Map("hc_norm.weight", "norm.scale", "(streams D) -> streams D"),
    Map("input_mix_weight_down.weight", "down.kernel", "stream_rank (streams D) -> streams D stream_rank"),
    Map("input_mix_weight_up.weight", "up.kernel", "(streams D) stream_rank -> stream_rank streams D"),
)
"""The rows of the values that are read from the residual streams."""

STREAM_ROWS = (
    *MIXER_ROWS,
    Map("block_inject_weight.weight", "inject.kernel", "streams_out (streams D) -> streams D streams_out"),
)

INDEXER_ROWS = (
    Map(
        "index_qk_proj.weight",
        ("q.kernel", "k.kernel"),
        "((index_heads index_dim) + index_dim) D -> D index_heads index_dim, D index_dim",
    ),
    Map("q_layernorm.weight", "q_norm.scale", "index_dim"),
    Map("k_layernorm.weight", "k_norm.scale", "index_dim"),
)

NGRAM_ROWS = (
    Map(
        "ple_embedding.ngram_embedding.shard_{ngram_parts}.weight",
        "table.embedding",
        "part_ngrams ngram_dim -> (ngram_parts part_ngrams) ngram_dim",
    ),
    Map("key_proj.weight", "key.kernel", "(streams D) ngram_width -> ngram_width streams D"),
    Map("value_proj.weight", "value.kernel", "D ngram_width -> ngram_width D"),
    *(
        Map(f"norm_{name}.weight", f"{name}_norm.scale", "(streams D) -> streams D")
        for name in ("key", "query", "conv")
    ),
    Map("conv1d.weight", "conv.kernel", "(streams D) 1 ngram_taps -> streams D ngram_taps"),
)
HASH_BUFFERS = ("layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets")


THEIR_LAYER, OUR_LAYER = "model.layers.{L}", "layers.{L}"

TABLE = MappingTable(
    (
        Map("model.embed_tokens.weight", "embed.embedding", "V D"),
        *under(f"{THEIR_LAYER}.attn_hyper_connection", f"{OUR_LAYER}.attn_streams", *STREAM_ROWS),
        *under(f"{THEIR_LAYER}.mlp_hyper_connection", f"{OUR_LAYER}.moe_streams", *STREAM_ROWS),
        *ATTENTION_OF_BOTH,
        *under(
            "model.layers.{attention_layers}.self_attn.indexer", "layers.{attention_layers}.attn.indexer", *INDEXER_ROWS
        ),
        *under("model.layers.{ngram_layers}.ple", "layers.{ngram_layers}.ngrams", *NGRAM_ROWS),
        *under(THEIR_LAYER, OUR_LAYER, *SHARED_MOE_ROWS),
        *under("model.hyper_connection_mixer", "norm", *MIXER_ROWS),
        Map("lm_head.weight", "lm_head.kernel", "V D -> D V", when="has_lm_head"),
    ),
    ignore={
        **{
            f"model.layers.{{ngram_layers}}.ple.ple_embedding.{name}": "computed from config.json"
            for name in HASH_BUFFERS
        },
        **OUTSIDE_TEXT,
    },
    copies={"lm_head.weight": "model.embed_tokens.weight"},
)

FAMILY = family(
    Config, TABLE, "Qwen4-Exp, the text model on its own", "Qwen4ExpForCausalLM", "Qwen4ExpForConditionalGeneration"
)
