"""dots3.note, the text model saved on its own: config and mapping table."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from tpuconv.errors import ConfigError
from tpuconv.jsonfile import short
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.kinds import faults_of_kinds, numbered_kinds
from tpuconv.models.common.rope import Rope, rope_of_layers
from tpuconv.models.common.rows import FURTHER_TOKENS, MLP, MTP_IGNORE, decoder_table
from tpuconv.models.common.sparse import MLP_KINDS
from tpuconv.models.deepseek_v3 import family as deepseek_v3
from tpuconv.models.deepseek_v32.family import INDEXER
from tpuconv.models.registry import family
from tpuconv.notation.table import Map, under

DOTS3_FULL, DOTS3_INDEXED, DOTS3_SLIDING = "full_attention", "indexed_attention", "sliding_attention"
"""The `layer_types` of layers that attend to all tokens, to selected tokens, and to the tokens of a window."""

DOTS3_LOCAL_ROPE = Rope(theta=50_000.0)
"""The rotary positions of a config.json without any, and the positions of layers with a window."""

SWA_SIZES = {
    "num_attention_heads": "N",
    "num_key_value_heads": "K",
    "q_lora_rank": "Q",
    "kv_lora_rank": "C",
    "qk_nope_head_dim": "P",
    "qk_rope_head_dim": "R",
    "v_head_dim": "H",
    "head_dim": "",
}
"""Sizes that layers with a window have of their own, and their letters. They begin with `swa_` in config.json, or stand
in its `per_layer_config`."""


@family_config
class Config(deepseek_v3.Config):
    """The keys of config.json. `swa_head_dim` is the sum of its parts. Releases call layers that attend to selected
    tokens "full_attention", unless `use_dsa` is false."""

    model_type: ClassVar[str] = "dots3_note_text"
    only: ClassVar = {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",), "mlp_bias": (False,)}
    least: ClassVar = {"first_k_dense_replace": 0, "num_nextn_predict_layers": 0}
    left_out: ClassVar[frozenset[str]] = frozenset({"moe_layer_freq", "per_layer_config"})
    aliases: ClassVar = {"moe_shared_expert_intermediate_size": "shared_experts_intermediate_size"}
    nullable: ClassVar[frozenset[str]] = frozenset({"sliding_window"})
    derived: ClassVar[frozenset[str]] = deepseek_v3.Config.derived | {"rope_interleave", "local_rope"}

    shared_experts_intermediate_size: int
    head_dim: int
    n_shared_experts: int
    q_lora_rank: int
    first_k_dense_replace: int = 1
    local_rope: Rope = DOTS3_LOCAL_ROPE
    swa_rope_theta: float = DOTS3_LOCAL_ROPE.theta
    mlp_layer_types: tuple[str, ...] | None
    layer_types: tuple[str, ...] | None
    use_dsa: bool | None = True
    use_sliding_window: bool = True
    sliding_window: int = 512
    index_topk: int
    index_head_dim: int
    index_n_heads: int
    swa_num_attention_heads: int = 64
    swa_num_key_value_heads: int = 64
    swa_q_lora_rank: int = 1024
    swa_kv_lora_rank: int = 1024
    swa_head_dim: int = 256
    swa_qk_nope_head_dim: int = 192
    swa_qk_rope_head_dim: int | None = None
    swa_v_head_dim: int = 128

    @classmethod
    def in_our_keys(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        out = super().in_our_keys(raw)
        if (window := out.pop("sliding_window_size", None)) is not None:
            out.setdefault("sliding_window", window)
        if isinstance(freq := raw.get("moe_layer_freq"), list) and out.get("mlp_layer_types") is None:
            dense = out.get("first_k_dense_replace", cls.first_k_dense_replace)
            kinds = numbered_kinds("moe_layer_freq", freq, tuple(MLP_KINDS.values()))
            out["mlp_layer_types"] = ["dense" if layer < dense else kind for layer, kind in enumerate(kinds)]
        if (given := raw.get("per_layer_config")) is None:
            return out
        sizes: list[Any] = list(given.values()) if isinstance(given, Mapping) else [None]
        if any(size != sizes[0] or not isinstance(size, Mapping) or set(size) - set(SWA_SIZES) for size in sizes):
            raise ConfigError(f"config.json: per_layer_config={short(given, 300)} has other sizes than one set")
        # What it leaves out is as in the other layers.
        own = {f"swa_{key}": size.get(key, raw.get(key, getattr(cls, key))) for size in sizes[:1] for key in SWA_SIZES}
        return {"use_dsa": None, **out, **own}

    @classmethod
    def read_ropes(cls, raw: Mapping[str, Any], context: int) -> dict[str, Any]:
        """As `DecoderConfig.read_ropes`, for layers without a window and for those with one. `partial_rotary_factor`
        follows from sizes."""
        theta, swa_theta = raw.get("rope_theta", cls.rope.theta), raw.get("swa_rope_theta", cls.swa_rope_theta)
        nested, scaling = raw.get("rope_parameters") or {}, raw.get("rope_scaling")
        whole = DOTS3_FULL if DOTS3_FULL in nested else DOTS3_INDEXED
        ropes = []
        for kind, base in ((whole, theta), (DOTS3_SLIDING, theta if nested or scaling else swa_theta)):
            own = rope_of_layers(raw, kind, base, scaling)["rope_parameters"]
            own.pop("partial_rotary_factor", None)
            ropes.append(Rope.from_hf({"rope_parameters": own}, cls.model_type, context))
        return dict(zip(("rope", "local_rope"), ropes, strict=True))

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        yield from faults_of_kinds(
            "layer_types", self.kinds, self.num_hidden_layers, (DOTS3_FULL, DOTS3_INDEXED, DOTS3_SLIDING)
        )
        if self.index_head_dim < self.qk_rope_head_dim:
            yield f"index_head_dim={self.index_head_dim} is less than qk_rope_head_dim={self.qk_rope_head_dim}"
        if {DOTS3_FULL, DOTS3_INDEXED} <= set(self.kinds):
            yield f"layer_types has {DOTS3_FULL!r} and {DOTS3_INDEXED!r}"
        sizes = self.swa_sizes
        if sizes["num_key_value_heads"] != sizes["num_attention_heads"]:
            yield f"swa_num_key_value_heads={sizes['num_key_value_heads']} is not the number of heads"
        if sizes["qk_rope_head_dim"] < 2 or sizes["qk_rope_head_dim"] % 2:
            yield f"swa_qk_rope_head_dim={sizes['qk_rope_head_dim']} is no number of pairs"
        elif sizes["qk_nope_head_dim"] + sizes["qk_rope_head_dim"] != self.swa_head_dim:
            yield f"swa_head_dim={self.swa_head_dim} is not the sum of swa_qk_nope_head_dim and swa_qk_rope_head_dim"

    def disagreements(self, raw: Mapping[str, Any]) -> Iterator[str]:
        given = raw.get("per_layer_config")
        if given is not None and set(given) != set(map(str, self.layers_of(DOTS3_SLIDING))):
            yield f"per_layer_config={short(given, 300)} is not for the layers with {DOTS3_SLIDING!r}"

    @property
    def kinds(self) -> tuple[str, ...]:
        """The `layer_types` of all layers."""
        whole = DOTS3_FULL if self.use_dsa is False else DOTS3_INDEXED
        if self.layer_types is None:
            layers = range(self.num_hidden_layers)
            return tuple(whole if not self.use_sliding_window or i < 2 or i % 4 == 1 else DOTS3_SLIDING for i in layers)
        if self.use_dsa is None:
            return self.layer_types
        return tuple(whole if kind in (DOTS3_FULL, DOTS3_INDEXED) else kind for kind in self.layer_types)

    def layers_of(self, kind: str) -> tuple[int, ...]:
        """Returns the numbers of the layers of a kind."""
        return tuple(layer for layer, other in enumerate(self.kinds) if other == kind)

    @property
    def indexers(self) -> tuple[int, ...]:
        """The layers with an indexer."""
        return self.layers_of(DOTS3_INDEXED)

    @property
    def horizons(self) -> frozenset[int]:
        return super().horizons | ({self.index_topk} if self.indexers else set())

    @property
    def swa_sizes(self) -> dict[str, int]:
        """The sizes of layers with a window, by the keys of `SWA_SIZES`."""
        sizes = {key: getattr(self, f"swa_{key}") for key in SWA_SIZES}
        if sizes["qk_rope_head_dim"] is None:
            sizes["qk_rope_head_dim"] = self.swa_head_dim - self.swa_qk_nope_head_dim
        return sizes

    @property
    def sizes(self) -> dict[str, int]:
        return {
            **super().sizes,
            "W": self.shared_experts_intermediate_size * self.n_shared_experts,
            "index_heads": self.index_n_heads,
            "index_dim": self.index_head_dim,
        }

    @property
    def layer_sets(self) -> dict[str, Sequence[int]]:
        return {**super().layer_sets, "indexer_layers": self.indexers}

    @property
    def layer_sizes(self) -> Mapping[int, Mapping[str, int]]:
        sizes = {SWA_SIZES[key]: size for key, size in self.swa_sizes.items() if SWA_SIZES[key]}
        return dict.fromkeys(self.layers_of(DOTS3_SLIDING), sizes)

    @property
    def windows(self) -> tuple[int | None, ...]:
        return tuple(self.sliding_window if kind == DOTS3_SLIDING else None for kind in self.kinds)

    @property
    def ropes(self) -> tuple[Rope | None, ...]:
        return tuple(self.local_rope if kind == DOTS3_SLIDING else self.rope for kind in self.kinds)

    @property
    def rope_dims(self) -> tuple[int, ...]:
        local = self.swa_sizes["qk_rope_head_dim"]
        return tuple(local if kind == DOTS3_SLIDING else self.qk_rope_head_dim for kind in self.kinds)


TABLE = decoder_table(
    *deepseek_v3.ATTENTION_ROWS,
    Map("self_attn.k_rope_only_layernorm.weight", "attn.k_rope_norm.scale", "R"),
    Map("self_attn.g_proj.weight", "attn.gate.kernel", "N D -> D N"),
    others=(
        *under("model.layers.{indexer_layers}", "layers.{indexer_layers}", *INDEXER),
        *under("model.layers.{I}.mlp", "layers.{I}.mlp", *MLP),
        *under("model.layers.{J}.mlp", "layers.{J}.moe", *deepseek_v3.EXPERT_ROWS),
    ),
    ignore={**MTP_IGNORE, "model.mtp.*": FURTHER_TOKENS},
)

FAMILY = family(Config, TABLE, "dots3.note, the text model saved on its own", "Dots3NoteForCausalLM")
