"""Mistral Large 4: the text model's config and mapping table."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.rope import Rope, layers_with_rope
from tpuconv.models.common.rows import FURTHER_TOKENS, NUMBERED_EXPERT_MLPS, when
from tpuconv.models.common.wrapper import BRINGS, SEES, WrapperConfig
from tpuconv.models.glm_moe_dsa import family as glm_moe_dsa
from tpuconv.models.registry import family
from tpuconv.models.towers.llava.modalities import MISTRAL_LARGE4_VISION
from tpuconv.notation.letters import Word, declare
from tpuconv.notation.table import Map, MappingTable, under

declare(
    rotary_pairs=Word("pairs of dimensions with rotary position"),
    rotary_layers=Word("layers with rotary positions"),
    plain_layers=Word("layers without rotary positions"),
    rotary_kv_layers=Word("layers with rotary positions, and keys and values of their own"),
    plain_kv_layers=Word("layers without rotary positions, with keys and values of their own"),
)


@family_config
class Config(WrapperConfig, glm_moe_dsa.Config):
    """The keys of `text_config`. `no_rope_layers` has 1 for a layer WITH rotary positions; without it every
    `no_rope_layer_interval`-th layer has none. In layers without, the R dimensions of a head that others rotate count
    among the P that are not rotated. `kv_source_layers` has for each layer the one whose latent vectors it reads."""

    model_type: ClassVar[str] = "mistral_large4"
    only: ClassVar = {"scoring_func": ("softmax",)}
    least: ClassVar = {**glm_moe_dsa.Config.least, "n_shared_experts": 1}
    derived: ClassVar[frozenset[str]] = glm_moe_dsa.Config.derived | {
        *("q_lora_rank", "num_nextn_predict_layers", "norm_topk_prob", "rope_interleave"),
    }
    default_rope: ClassVar[Mapping[str, Any]] = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 2048.0,
        "original_max_position_embeddings": 512,
        "attention_factor": 1.0,
    }

    num_nextn_predict_layers: int = 0
    q_lora_rank: int | None = None  # type: ignore[assignment]
    no_rope_layers: tuple[int, ...] | None
    no_rope_layer_interval: int = 4
    kv_source_layers: tuple[int, ...] | None
    final_logit_softcapping: float
    head_dim: int | None = None

    def contradictions(self) -> Iterator[str]:
        for key, given in (("no_rope_layers", self.with_rope), ("kv_source_layers", self.kv_sources)):
            if len(given) != self.num_hidden_layers:
                yield f"{key} has {len(given)} entries for num_hidden_layers={self.num_hidden_layers}"
                return
        yield from super().contradictions()
        if self.final_logit_softcapping <= 0:
            yield f"final_logit_softcapping={self.final_logit_softcapping} is not positive"
        if self.rope.depends_on_length:
            yield f"rotary positions of the type {self.rope.type!r} are not implemented with learned frequencies"
        last: dict[bool, int] = {}  # for layers with and without rotary positions the last one that others read
        for layer, source in enumerate(self.kv_sources):
            with_rope = self.with_rope[layer]
            if source == layer and layer in self.kv_producers:
                last[with_rope] = layer
            elif source != layer and last.get(with_rope) != source:
                yield (
                    f"kv_source_layers gives layer {layer} the latent vectors of layer {source}, which is not the last "
                    f"one before it that others read with{'' if with_rope else 'out'} rotary positions"
                )
                return

    @property
    def with_rope(self) -> tuple[bool, ...]:
        """For each layer, True if it has rotary positions."""
        return layers_with_rope(self.no_rope_layers, self.no_rope_layer_interval, self.num_hidden_layers)

    @property
    def kv_sources(self) -> tuple[int, ...]:
        """For each layer the one whose latent vectors of keys and values it reads, which may be itself."""
        return tuple(range(self.num_hidden_layers)) if self.kv_source_layers is None else self.kv_source_layers

    @property
    def kv_producers(self) -> frozenset[int]:
        """The layers whose latent vectors later ones read."""
        return frozenset(source for layer, source in enumerate(self.kv_sources) if source != layer)

    @property
    def ropes(self) -> tuple[Rope | None, ...]:
        return tuple(self.rope if rope else None for rope in self.with_rope)

    @property
    def sizes(self) -> dict[str, int]:
        return {**super().sizes, "rotary_pairs": self.qk_rope_head_dim // 2}

    @property
    def layer_sets(self) -> dict[str, Sequence[int]]:
        def layers(rope: bool, own: bool) -> tuple[int, ...]:
            found = enumerate(zip(self.with_rope, self.kv_sources, strict=True))
            return tuple(i for i, (has, source) in found if has == rope and (source == i or not own))

        return {
            **super().layer_sets,
            "rotary_layers": layers(rope=True, own=False),
            "plain_layers": layers(rope=False, own=False),
            "rotary_kv_layers": layers(rope=True, own=True),
            "plain_kv_layers": layers(rope=False, own=True),
        }

    @property
    def layer_sizes(self) -> Mapping[int, Mapping[str, int]]:
        whole = self.qk_nope_head_dim + self.qk_rope_head_dim
        return {layer: {"P": whole} for layer, rope in enumerate(self.with_rope) if not rope}

    @property
    def unscannable(self) -> str:
        return "some of its layers have no rotary positions, or attend to what an earlier one selected or made"

    @property
    def inseparable(self) -> str:
        return "layers hand selected tokens and latent vectors on to later ones, and have learned frequencies"


def _in(layers: str, *rows: Map) -> tuple[Map, ...]:
    """Rows of the attention of some layers."""
    return under(f"layers.{{{layers}}}.attention", f"layers.{{{layers}}}.attn", *rows)


def _gated(width: str) -> tuple[Map, ...]:
    return (
        Map("w1.weight", "gate.kernel", f"{width} D -> D {width}"),
        Map("w3.weight", "up.kernel", f"{width} D -> D {width}"),
        Map("w2.weight", "down.kernel", f"D {width} -> {width} D"),
    )


LATENT_NORM = Map("kv_a_norm.weight", "kv_a_norm.scale", "C")

TABLE = MappingTable(
    (
        Map("tok_embeddings.weight", "embed.embedding", "V D"),
        Map("lerope.alpha", "rotary.alpha", "rotary_pairs", buffer=True),
        *under(
            "layers.{L}",
            "layers.{L}",
            Map("attention_norm.weight", "attn_norm.scale", "D"),
            Map("ffn_norm.weight", "mlp_norm.scale", "D"),
        ),
        *_in(
            "L",
            Map("ssmax_scaling.s", "ssmax.scale", "N"),
            Map("ssmax_scaling.b", "ssmax.bias", "N"),
            Map("wkv_b.weight", ("k_b.kernel", "v_b.kernel"), "(N (P + H)) C -> C N P, C N H"),
            Map("wo.weight", "o.kernel", "D (N H) -> N H D"),
            Map("wo.bias", "o.bias", "D", when="attention_bias"),
        ),
        *_in("rotary_layers", Map("wq.weight", ("q_nope.kernel", "q_rope.kernel"), "(N (P + R)) D -> D N P, D N R")),
        *_in("plain_layers", Map("wq.weight", "q_nope.kernel", "(N P) D -> D N P")),
        *_in(
            "rotary_kv_layers",
            Map("wkv_a_with_mqa.weight", ("kv_a.kernel", "k_rope.kernel"), "(C + R) D -> D C, D R"),
            *when("attention_bias", Map("wkv_a_with_mqa.bias", ("kv_a.bias", "k_rope.bias"), "(C + R) -> C, R")),
            LATENT_NORM,
        ),
        *_in(
            "plain_kv_layers",
            Map("wkv_a_with_mqa.weight", "kv_a.kernel", "C D -> D C"),
            Map("wkv_a_with_mqa.bias", "kv_a.bias", "C", when="attention_bias"),
            LATENT_NORM,
        ),
        *under(
            "layers.{indexer_layers}.attention.indexer",
            "layers.{indexer_layers}.attn.indexer",
            Map("q_input_norm.weight", "q_norm.scale", "D"),
            Map("q_input_norm.bias", "q_norm.bias", "D"),
            Map("wq_b.weight", "q.kernel", "(index_heads index_dim) D -> D index_heads index_dim"),
            Map("ssmax_scaling.s", "ssmax.scale", "index_heads"),
            Map("ssmax_scaling.b", "ssmax.bias", "index_heads"),
            Map("wk.weight", "k.kernel", "index_dim D -> D index_dim"),
            Map("k_norm.weight", "k_norm.scale", "index_dim"),
            Map("k_norm.bias", "k_norm.bias", "index_dim"),
            Map("weights_proj.weight", "router.kernel", "index_heads D -> D index_heads"),
        ),
        *under("layers.{I}.feed_forward", "layers.{I}.mlp", *_gated("F")),
        *under(
            "layers.{J}",
            "layers.{J}.moe",
            Map("gate.weight", "router.kernel", "E D -> D E"),
            *NUMBERED_EXPERT_MLPS,
            *under("shared_experts", "shared", *_gated("W")),
        ),
        Map("norm.weight", "norm.scale", "D"),
        Map("output.weight", "lm_head.kernel", "V D -> D V", when="has_lm_head"),
    ),
    ignore={
        "vision_encoder.*": SEES,
        **{f"{name}.*": BRINGS for name in ("pre_mm_projector_norm", "patch_merger", "vision_language_adapter")},
        "mtp_dspark.*": FURTHER_TOKENS,
    },
    copies={"output.weight": "tok_embeddings.weight"},
)

FAMILY = family(
    Config, TABLE, "Mistral Large 4", "MistralLarge4ForConditionalGeneration", modalities=(MISTRAL_LARGE4_VISION,)
)
