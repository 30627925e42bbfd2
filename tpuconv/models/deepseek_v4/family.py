"""DeepSeek V4: config and mapping table."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.config_keys import unnested
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.kinds import faults_of_kinds
from tpuconv.models.common.rope import PLAIN_ROPE, Rope
from tpuconv.models.common.rows import FURTHER_TOKENS, NUMBERED_EXPERT_MLPS
from tpuconv.models.common.windows import OneWindow
from tpuconv.models.registry import family
from tpuconv.notation.letters import Word, declare
from tpuconv.notation.table import Map, MappingTable, under

declare(
    output_groups=Word("groups of heads with an output projection of their own", as_="K"),
    group_heads=Word("query heads of each of these groups", as_="G"),
    group_dim=Word("latent width of such a group"),
    sparse_layers=Word("layers with compressed keys and an indexer"),
    heavy_layers=Word("layers with heavily compressed keys"),
    sparse_tokens=Word("tokens of a compressed key"),
    heavy_tokens=Word("tokens of a heavily compressed key"),
    hashed_layers=Word("layers that choose experts by token ids"),
    scored_layers=Word("layers that choose experts by scores"),
    last_tokens=Word("tokens of which the next compressed keys are made"),
    series=Word("series of vectors that compressed keys are made of"),
)

SLIDING, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
RATIOS = {0: SLIDING, 4: SPARSE, 128: HEAVY}
"""The entries of `compress_ratios` of the releases, and the `layer_types` that they stand for."""
RATES = {"compress_rate_csa": SPARSE, "compress_rate_hca": HEAVY}
"""Keys of older files, and the keys of `compress_rates` that they stand for."""
HASHED, SCORED = "hash_moe", "moe"
OLDER_KEYS = ("compress_ratios", "num_hash_layers", "compress_rates", "partial_rotary_factor", "intermediate_size")


@dataclass(frozen=True, kw_only=True)
class StreamsConfig(OneWindow, DecoderConfig):
    """The keys that DeepSeek V4 and V4.1 share: residual streams, one key for all heads, experts in all layers."""

    only: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "scoring_func": ("sqrtsoftplus",),
        "topk_method": ("noaux_tc",),
        "norm_topk_prob": (True,),
        "attention_bias": (False,),
        "n_shared_experts": (1,),
        "num_key_value_heads": (1,),
    }
    derived: ClassVar[frozenset[str]] = DecoderConfig.derived | {"compress_rope"}
    hf_names: ClassVar[Mapping[str, str]] = {"intermediate_size": "moe_intermediate_size"}

    head_dim: int
    qk_rope_head_dim: int | None = None
    q_lora_rank: int
    n_routed_experts: int
    num_experts_per_tok: int
    routed_scaling_factor: float
    swiglu_limit: float
    compress_rope: Rope = PLAIN_ROPE
    compress_rope_theta: float = 160000.0
    sliding_window: int
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    o_groups: int
    o_lora_rank: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int

    @classmethod
    def read_ropes(cls, raw: Mapping[str, Any], context: int) -> dict[str, Any]:
        """As `DecoderConfig.read_ropes`, with the positions of layers that compress keys."""
        nested = raw.get("rope_parameters") or {}
        flat = raw.get("rope_scaling") or {k: v for k, v in nested.items() if k not in ("main", "compress")}
        main, compress = (nested.get(kind) for kind in ("main", "compress"))
        if not isinstance(main, Mapping) or not isinstance(compress, Mapping):
            main = {"rope_theta": raw.get("rope_theta", PLAIN_ROPE.theta)}
            compress = {**flat, "rope_theta": raw.get("compress_rope_theta", cls.compress_rope_theta)}
        if compress.get("rope_type", compress.get("type")) == "yarn":
            compress = {"attention_factor": 1.0, **compress}
        ropes = {
            field: {"rope_parameters": {key: value for key, value in given.items() if key != "partial_rotary_factor"}}
            for field, given in (("rope", main), ("compress_rope", compress))
        }
        return {field: Rope.from_hf(given, cls.model_type, context) for field, given in ropes.items()}

    def disagreements(self, raw: Mapping[str, Any]) -> Iterator[str]:
        yield from super().disagreements(raw)
        ropes = unnested(raw, "text_config").get("rope_parameters") or {}
        for kind in ("main", "compress"):
            part = ropes[kind].get("partial_rotary_factor") if isinstance(ropes.get(kind), Mapping) else None
            if isinstance(part, int | float) and int(self.head_dim * part) != self.rope_dim:
                yield f"partial_rotary_factor={part} of {kind} is not qk_rope_head_dim={self.rope_dim}"

    def contradictions(self) -> Iterator[str]:
        heads, groups = self.num_attention_heads, self.o_groups
        if heads % groups:
            yield f"num_attention_heads={heads} is not a multiple of o_groups={groups}"
        if self.rope_dim % 2 or not 0 < self.rope_dim <= min(self.head_dim, self.index_head_dim):
            yield f"qk_rope_head_dim={self.rope_dim} is not an even part of head_dim and index_head_dim"
        if self.num_experts_per_tok > self.n_routed_experts:
            yield f"num_experts_per_tok={self.num_experts_per_tok} is more than n_routed_experts"
        if self.rms_norm_eps < 0:
            yield f"rms_norm_eps={self.rms_norm_eps} is negative"

    @property
    def sizes(self) -> dict[str, int]:
        return {
            **super().sizes,
            "C": self.head_dim,  # a key is its value too: a latent vector that all heads share
            "output_groups": self.o_groups,
            "group_heads": self.num_attention_heads // self.o_groups,
            "Q": self.q_lora_rank,
            "group_dim": self.o_lora_rank,
            "E": self.n_routed_experts,
            "M": self.intermediate_size,
            "W": self.intermediate_size,
            "X": self.num_experts_per_tok,
            "index_heads": self.index_n_heads,
            "index_dim": self.index_head_dim,
            "streams": self.hc_mult,
            "stream_weights": (2 + self.hc_mult) * self.hc_mult,
        }

    @property
    def rope_dim(self) -> int:
        return self.head_dim // 8 if self.qk_rope_head_dim is None else self.qk_rope_head_dim

    @property
    def unrounded_cache(self) -> str:
        return "rounded entries would be rounded again when they are compressed"


@family_config
class Config(StreamsConfig):
    """The keys of config.json. `intermediate_size` is the width of an expert; the releases have `compress_ratios` in
    place of `layer_types`, and `num_hash_layers` in place of `mlp_layer_types`."""

    model_type: ClassVar[str] = "deepseek_v4"
    only: ClassVar = {
        **StreamsConfig.only,
        "mlp_bias": (False,),
        "expert_dtype": ("fp4", "fp8", "bf16", "bfloat16"),  # read by tpuconv.encodings
    }
    least: ClassVar = {"num_nextn_predict_layers": 0}
    left_out: ClassVar[frozenset[str]] = frozenset(OLDER_KEYS)

    num_nextn_predict_layers: int
    compress_rate_csa: int = 4
    compress_rate_hca: int = 128
    layer_types: tuple[str, ...] | None
    mlp_layer_types: tuple[str, ...] | None

    @classmethod
    def in_our_keys(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        out = super().in_our_keys(raw)
        layers = raw.get("num_hidden_layers", cls.num_hidden_layers)
        ratios, hashed, rates = (raw.get(key) for key in OLDER_KEYS[:3])
        if raw.get("intermediate_size") is not None:
            out.setdefault("moe_intermediate_size", raw["intermediate_size"])
        if isinstance(rates, Mapping):
            out |= {key: rates[kind] for key, kind in RATES.items() if kind in rates and raw.get(key) is None}
        if out.get("layer_types") is None and isinstance(ratios, list):
            out["layer_types"] = [RATIOS.get(ratio, f"ratio {ratio}") for ratio in ratios[:layers]]
        if out.get("mlp_layer_types") is None and type(hashed) is int:
            out["mlp_layer_types"] = [HASHED if layer < hashed else SCORED for layer in range(layers)]
        part = raw.get("partial_rotary_factor")
        if out.get("qk_rope_head_dim") is None and isinstance(part, int | float):
            out["qk_rope_head_dim"] = int(raw.get("head_dim", cls.head_dim) * part)
        return out

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        yield from faults_of_kinds("layer_types", self.kinds, self.num_hidden_layers, RATIOS.values())
        yield from faults_of_kinds("mlp_layer_types", self.mlp_kinds, self.num_hidden_layers, (HASHED, SCORED))

    @property
    def kinds(self) -> tuple[str, ...]:
        """The `layer_types` of all layers."""
        if self.layer_types is not None:
            return self.layer_types
        layers = range(self.num_hidden_layers)
        return tuple(SPARSE if layer > 2 and layer % 2 else HEAVY for layer in layers)

    def kind_of(self, layer: int) -> str:
        """Returns the `layer_types` entry of a layer; those for multi-token prediction, after the model's own, see the
        window alone."""
        return self.kinds[layer] if layer < self.num_hidden_layers else SLIDING

    @property
    def mlp_kinds(self) -> tuple[str, ...]:
        """The `mlp_layer_types` of all layers."""
        if self.mlp_layer_types is not None:
            return self.mlp_layer_types
        return tuple(HASHED if layer < 3 else SCORED for layer in range(self.num_hidden_layers))

    @property
    def sizes(self) -> dict[str, int]:
        return {
            **super().sizes,
            "A": self.hidden_size,
            "sparse_tokens": self.compress_rate_csa,
            "heavy_tokens": self.compress_rate_hca,
            "streams_out": self.hc_mult,
        }

    @property
    def layer_sets(self) -> dict[str, Sequence[int]]:
        layers = range(self.num_hidden_layers)
        return {
            **super().layer_sets,
            "U": tuple(range(self.num_nextn_predict_layers)),
            "sparse_layers": tuple(layer for layer in layers if self.kinds[layer] == SPARSE),
            "heavy_layers": tuple(layer for layer in layers if self.kinds[layer] == HEAVY),
            "hashed_layers": tuple(layer for layer in layers if self.mlp_kinds[layer] == HASHED),
            "scored_layers": tuple(layer for layer in layers if self.mlp_kinds[layer] == SCORED),
        }

    @property
    def ropes(self) -> tuple[Rope | None, ...]:
        return tuple(self.rope if kind == SLIDING else self.compress_rope for kind in self.kinds)

    @property
    def horizons(self) -> frozenset[int]:
        selected = {self.index_topk * self.compress_rate_csa} if SPARSE in self.kinds else set()
        return super().horizons | selected

    @property
    def unscannable(self) -> str:
        return "its layers compress keys and choose experts in different ways"

    @property
    def inseparable(self) -> str:
        return "its layers pass on several residual streams, and some choose experts by the ids of tokens"


def compressor(width: str, tokens: str, *series: str) -> tuple[Map, ...]:
    """Returns the rows of a compressor of keys of this width: each entry is made of so many tokens, by one or two
    series of vectors."""
    parts = " + ".join(width for _ in series)
    return (
        Map(
            "wkv.weight",
            tuple(f"{name}.kv.kernel" for name in series),
            f"({parts}) D -> " + ", ".join(f"D {width}" for _ in series),
        ),
        Map(
            "wgate.weight",
            tuple(f"{name}.gate.kernel" for name in series),
            f"({parts}) D -> " + ", ".join(f"D {width}" for _ in series),
        ),
        Map(
            "ape",
            tuple(f"{name}.bias" for name in series),
            f"{tokens} ({parts}) -> " + ", ".join(f"{tokens} {width}" for _ in series),
        ),
        Map("norm.weight", "norm.scale", width),
    )


SPARSE_SERIES = ("before", "current")


def streams(hf: str, jax: str) -> tuple[Map, ...]:
    """Returns the rows of the hyper-connections of a part of a layer."""
    return (
        Map(f"{hf}_fn", f"{jax}.kernel", "stream_weights (streams D) -> streams D stream_weights"),
        Map(f"{hf}_base", f"{jax}.base", "stream_weights"),
        Map(f"{hf}_scale", tuple(f"{jax}.{name}_scale" for name in ("pre", "post", "mix")), "(1 + 1 + 1) -> 1, 1, 1"),
    )


LAYER_ROWS = (
    Map("attn_norm.weight", "attn_norm.scale", "D"),
    Map("ffn_norm.weight", "moe_norm.scale", "D"),
    *streams("hc_attn", "attn_streams"),
    *streams("hc_ffn", "moe_streams"),
    *under(
        "attn",
        "attn",
        Map("wq_a.weight", "q_a.kernel", "Q D -> D Q"),
        Map("q_norm.weight", "q_a_norm.scale", "Q"),
        Map("wq_b.weight", "q.kernel", "(N H) Q -> Q N H"),
        Map("wkv.weight", "kv.kernel", "H D -> D H"),
        Map("kv_norm.weight", "kv_norm.scale", "H"),
        Map(
            "wo_a.weight",
            "o_a.kernel",
            "(output_groups group_dim) (group_heads H) -> output_groups group_heads H group_dim",
        ),
        Map("wo_b.weight", "o_b.kernel", "D (output_groups group_dim) -> output_groups group_dim D"),
        Map("attn_sink", "sinks", "N"),
    ),
    *under(
        "ffn",
        "moe",
        Map("gate.weight", "router.kernel", "E D -> D E"),
        *NUMBERED_EXPERT_MLPS,
        Map("shared_experts.w1.weight", "shared.gate.kernel", "W D -> D W"),
        Map("shared_experts.w3.weight", "shared.up.kernel", "W D -> D W"),
        Map("shared_experts.w2.weight", "shared.down.kernel", "D W -> W D"),
    ),
)

V4_MTP_ROWS = (
    Map("enorm.weight", "embed_norm.scale", "D"),
    Map("hnorm.weight", "hidden_norm.scale", "D"),
    Map("e_proj.weight", "from_embed.kernel", "D A -> A D"),
    Map("h_proj.weight", "from_hidden.kernel", "D A -> A D"),
    Map("ffn.gate.bias", "moe.correction", "E", buffer=True),
    Map("hc_head_fn", "norm.kernel", "streams_out (streams D) -> streams D streams_out"),
    Map("hc_head_base", "norm.base", "streams_out"),
    Map("hc_head_scale", "norm.pre_scale", "1"),
    Map("norm.weight", "norm.scale", "D"),
)
"""A layer for multi-token prediction, besides the rows of every layer. It has no compressed keys."""

TABLE = MappingTable(
    (
        Map("embed.weight", "embed.embedding", "V D"),
        *under("layers.{L}", "layers.{L}", *LAYER_ROWS),
        *under("mtp.{U}", "mtp.{U}", *LAYER_ROWS, *V4_MTP_ROWS),
        *under(
            "layers.{heavy_layers}.attn.compressor",
            "layers.{heavy_layers}.attn.compressor",
            *compressor("H", "heavy_tokens", SPARSE_SERIES[1]),
        ),
        *under(
            "layers.{sparse_layers}.attn.compressor",
            "layers.{sparse_layers}.attn.compressor",
            *compressor("H", "sparse_tokens", *SPARSE_SERIES),
        ),
        *under(
            "layers.{sparse_layers}.attn.indexer",
            "layers.{sparse_layers}.attn.indexer",
            Map("wq_b.weight", "q.kernel", "(index_heads index_dim) Q -> Q index_heads index_dim"),
            Map("weights_proj.weight", "router.kernel", "index_heads D -> D index_heads"),
            *under("compressor", "compressor", *compressor("index_dim", "sparse_tokens", *SPARSE_SERIES)),
        ),
        Map(
            "layers.{hashed_layers}.ffn.gate.tid2eid", "layers.{hashed_layers}.moe.experts_of_token", "V X", buffer=True
        ),
        Map("layers.{scored_layers}.ffn.gate.bias", "layers.{scored_layers}.moe.correction", "E", buffer=True),
        Map("hc_head_fn", "norm.kernel", "streams_out (streams D) -> streams D streams_out"),
        Map("hc_head_base", "norm.base", "streams_out"),
        Map("hc_head_scale", "norm.pre_scale", "1"),
        Map("norm.weight", "norm.scale", "D"),
        Map("head.weight", "lm_head.kernel", "V D -> D V", when="has_lm_head"),
    ),
    ignore={"mtp.*": FURTHER_TOKENS},
    copies={"head.weight": "embed.weight"},
)

FAMILY = family(Config, TABLE, "DeepSeek V4", "DeepseekV4ForCausalLM")
