"""GLM-5.3-Flash: the text model's config and mapping table."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.hybrid import StateConfig
from tpuconv.models.common.rope import Rope
from tpuconv.models.common.rows import MLP, MTP_IGNORE, PRE_NORMS, decoder_table, when
from tpuconv.models.common.wrapper import SEES, WrapperConfig, inside
from tpuconv.models.deepseek_v3 import family as deepseek_v3
from tpuconv.models.deepseek_v4.family import streams
from tpuconv.models.glm_moe_dsa import family as glm_moe_dsa
from tpuconv.models.kimi_linear.family import KDA_BESIDE_RATES, LINEAR_KEYS
from tpuconv.models.registry import family
from tpuconv.models.towers.qwen_vit.modalities import GLM5_VISION
from tpuconv.notation.letters import Word, declare
from tpuconv.notation.table import Map, under

declare(
    pool_tokens=Word("tokens of a pool of keys"),
)

GLM_LINEAR, GLM_INDEXED = "linear_attention", "indexed_attention"
"""The `layer_types`. The second is "full_attention" in other files."""

GLM_LINEAR_KEYS = {**LINEAR_KEYS, "gate_lower_bound": "linear_lower_bound"}
"""The keys of `linear_attn_config`, and those that they stand for."""


@family_config
class Config(WrapperConfig, glm_moe_dsa.Config, StateConfig):
    """The keys of `text_config`, which may stand at the root. There are no rotary positions. `indexer_types` is about
    the layers with latent attention alone."""

    model_type: ClassVar[str] = "glm5_next"
    flat: ClassVar[bool] = True
    other_kinds: ClassVar[tuple[str, ...]] = (GLM_INDEXED,)
    known_kinds: ClassVar[tuple[str, ...]] = (GLM_LINEAR, GLM_INDEXED)
    only: ClassVar = {
        **deepseek_v3.Config.only,
        "qk_rope_head_dim": (0,),
        "index_kpool_always_select_tail": (True,),  # without it first tokens attend to nothing
    }
    least: ClassVar = {
        **{"qk_rope_head_dim": 0, "num_nextn_predict_layers": 0, "index_topk_freq": 0, "index_skip_topk_offset": 0},
        **{"n_shared_experts": 1, "first_k_dense_replace": 0},
    }
    derived: ClassVar[frozenset[str]] = glm_moe_dsa.Config.derived | {
        *("rope_interleave", "first_k_dense_replace", "head_dim"),
    }
    left_out: ClassVar[frozenset[str]] = frozenset({"head_dim", "linear_attn_config"})

    linear_head_dim: int
    linear_num_heads: int
    linear_conv_kernel_dim: int
    linear_lower_bound: float | None
    index_kpool: int
    hc_mult: int
    hc_eps: float
    hc_sinkhorn_iters: int
    swiglu_limit: float
    head_dim: int | None = None

    @classmethod
    def in_our_keys(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """As `StateConfig.in_our_keys`. Also reads `linear_attn_config`, as transformers does."""
        out, inside = super().in_our_keys(raw), raw.get("linear_attn_config")
        if isinstance(kinds := out.get("layer_types"), list):
            out["layer_types"] = [GLM_INDEXED if kind == "full_attention" else kind for kind in kinds]
        if isinstance(inside, Mapping):
            out |= {name: inside[key] for key, name in GLM_LINEAR_KEYS.items() if key in inside}
            if inside.get("safe_gate", True) and out.get("linear_lower_bound", 0) is None:
                out["linear_lower_bound"] = cls.linear_lower_bound
        return out

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.index_topk % self.index_kpool:
            yield f"index_topk={self.index_topk} is not a multiple of index_kpool={self.index_kpool}"
        if self.swiglu_limit <= 0:
            yield f"swiglu_limit={self.swiglu_limit} is not positive"
        if alone := [i for i in self.layers_of(GLM_INDEXED) if i not in self.indexers and i - 1 not in self.indexers]:
            layers = ", ".join(map(str, alone))
            yield f"indexer_types gives layers {layers} the selection of a layer before them, which has no indexer"

    @property
    def kinds(self) -> tuple[str, ...]:
        if self.layer_types is not None:
            return self.layer_types
        return tuple(GLM_LINEAR if i % 4 != 3 else GLM_INDEXED for i in range(self.num_hidden_layers))

    @property
    def indexer_kinds(self) -> tuple[str, ...]:
        linear = self.layers_of(GLM_LINEAR)
        return tuple("full" if i in linear else kind for i, kind in enumerate(super().indexer_kinds))

    @property
    def indexers(self) -> tuple[int, ...]:
        return tuple(i for i in super().indexers if i in self.layers_of(GLM_INDEXED))

    @property
    def ropes(self) -> tuple[Rope | None, ...]:
        return (None,) * self.num_hidden_layers

    @property
    def score_scale(self) -> float:
        """The factor of attention scores."""
        return float(self.qk_nope_head_dim**-0.5)

    @property
    def sizes(self) -> dict[str, int]:
        return {
            **super().sizes,
            "groups": self.linear_num_heads,
            "key_dim": self.linear_head_dim,
            "value_dim": self.linear_head_dim,
            "taps": self.linear_conv_kernel_dim,
            "index_heads": self.index_n_heads,
            "pool_tokens": self.index_kpool,
            "streams": self.hc_mult,
            "stream_weights": (2 + self.hc_mult) * self.hc_mult,
        }

    @property
    def inseparable(self) -> str:
        return "layers hand several residual streams and the tokens that they selected on to later ones"


PLAIN_LATENT_ROWS = (
    Map("q_a_proj.weight", "q_a.kernel", "Q D -> D Q"),
    *when("attention_bias", Map("q_a_proj.bias", "q_a.bias", "Q")),
    Map("q_a_layernorm.weight", "q_a_norm.scale", "Q"),
    Map("q_b_proj.weight", "q_nope.kernel", "(N P) Q -> Q N P"),
    Map("kv_a_proj_with_mqa.weight", "kv_a.kernel", "C D -> D C"),
    *when("attention_bias", Map("kv_a_proj_with_mqa.bias", "kv_a.bias", "C")),
    Map("kv_a_layernorm.weight", "kv_a_norm.scale", "C"),
    Map("kv_b_proj.weight", ("k_b.kernel", "v_b.kernel"), "(N (P + H)) C -> C N P, C N H"),
    Map("o_proj.weight", "o.kernel", "D (N H) -> N H D"),
    *when("attention_bias", Map("o_proj.bias", "o.bias", "D")),
)
"""Latent attention without rotary positions."""

POOL_ROWS = (
    Map("wq_b.weight", "q.kernel", "(index_heads index_dim) Q -> Q index_heads index_dim"),
    Map("wk.weight", "k.kernel", "index_dim D -> D index_dim"),
    Map("k_norm.weight", "k_norm.scale", "index_dim"),
    Map("k_norm.bias", "k_norm.bias", "index_dim"),
    Map("weights_proj.weight", "router.kernel", "index_heads D -> D index_heads"),
    Map("index_kpool_compress_gate", "router_gate.kernel", "index_dim D -> D index_dim"),
    Map("index_kpool_compress_ape", "bias", "pool_tokens index_dim"),
)
"""The indexer."""

TABLE = inside(
    decoder_table(
        *PRE_NORMS,
        *streams("hc_attn", "attn_streams"),
        *streams("hc_ffn", "mlp_streams"),
        others=(
            *under("model.layers.{attention_layers}.self_attn", "layers.{attention_layers}.attn", *PLAIN_LATENT_ROWS),
            *under(
                "model.layers.{indexer_layers}.self_attn.indexer", "layers.{indexer_layers}.attn.indexer", *POOL_ROWS
            ),
            *under(
                "model.layers.{state_layers}.self_attn",
                "layers.{state_layers}.attn",
                *KDA_BESIDE_RATES,
                Map("A_log", "a_log", "groups"),
            ),
            *under("model.layers.{I}.mlp", "layers.{I}.mlp", *MLP),
            *under("model.layers.{J}.mlp", "layers.{J}.moe", *deepseek_v3.EXPERT_ROWS),
        ),
        ignore=MTP_IGNORE,
    ),
    "model.language_model.",
    {"visual": SEES},
)

FAMILY = family(Config, TABLE, "GLM-5.3-Flash", "Glm5NextForConditionalGeneration", modalities=(GLM5_VISION,))
