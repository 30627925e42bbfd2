"""Step-5 Preview, the text model: config and mapping table."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from tpuconv.jsonfile import short
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.key_types import object_of
from tpuconv.models.common.windows import WINDOW_KINDS
from tpuconv.models.registry import family
from tpuconv.models.step3p5 import family as step3p5
from tpuconv.notation.table import Map, under

OF_KINDS = {"head_dim": "H", "num_attention_groups": "K"}
"""Keys that config.json has for each type of layers too, and the letters of what all layers have."""


@family_config
class Config(step3p5.Config):
    """The keys of config.json and of its `sparse_config`, whose defaults come from vLLM. Lists may have entries for
    more layers than the model has.

    Attributes:
        proxy_dim, sparse_indexer_rope_dim: the dimension of an indexer's heads, and how many of them have rotary
            positions.
        num_provider_groups: the number of groups of query heads that select together.
        region_block_size, topk: the tokens of a region, and the regions that a token selects.
    """

    model_type: ClassVar[str] = "step4"
    only: ClassVar = {
        **step3p5.Config.only,
        "fp32_residual_connection": (True,),
        "norm_dtype": ("float32",),
        # Of `sparse_config`.
        "enabled": (True,),
        "sparse_indexer_use_rope": (True,),
        "sparse_indexer_num_k_heads": (1,),
        "sparse_indexer_q_norm_type": ("rmsnorm",),
        "sparse_indexer_k_norm_type": ("layernorm",),
        "sparse_indexer_csa_z_norm_type": ("none",),
        "sparse_indexer_softmax_variant": ("ssmax",),
        "sparse_indexer_ssmax_s_granularity": ("q_head",),
        "compression_method": ("csa_block_compress",),
        "attention_impl": ("sparse_gqa",),
        "apply_to_layer_types": (["full_attention"],),
    }
    left_out: ClassVar[frozenset[str]] = step3p5.Config.left_out | {
        "sparse_config",
        *(f"{key}_{kind}" for key in OF_KINDS for kind in WINDOW_KINDS),
    }

    proxy_dim: int = 256
    sparse_indexer_rope_dim: int = 32
    sparse_indexer_num_heads: int = 16
    num_provider_groups: int = 4
    region_block_size: int = 8
    topk: int = 512

    @classmethod
    def in_our_keys(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        out, layers = dict(raw), raw.get("num_hidden_layers", cls.num_hidden_layers)
        if type(layers) is int and layers > 0:
            out |= {key: out[key][:layers] for key in step3p5.LAYER_LISTS if isinstance(out.get(key), list)}
        return {**super().in_our_keys(out), **object_of(raw, "sparse_config")}

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        groups, heads, turned = self.num_provider_groups, self.sparse_indexer_num_heads, self.sparse_indexer_rope_dim
        for key, count in (("num_attention_heads", self.num_attention_heads), ("sparse_indexer_num_heads", heads)):
            if count % groups:
                yield f"{key}={count} is not a multiple of num_provider_groups={groups}"
        if turned % 2 or turned > self.proxy_dim:
            yield f"sparse_indexer_rope_dim={turned} is not an even part of proxy_dim={self.proxy_dim}"
        if self.rope.depends_on_length:
            yield f"rotary positions of the type {self.rope.type!r} depend on the length, which an indexer's do not"

    def disagreements(self, raw: Mapping[str, Any]) -> Iterator[str]:
        yield from super().disagreements(raw)
        for key, letter in OF_KINDS.items():
            for kind in WINDOW_KINDS:
                given, expected = raw.get(f"{key}_{kind}"), self.sizes[letter]
                if given not in (None, expected):
                    yield f"{key}_{kind}={short(given)} is not {expected}, as in all layers"

    @property
    def sizes(self) -> dict[str, int]:
        return {
            **super().sizes,
            "index_heads": self.sparse_indexer_num_heads,
            "index_dim": self.proxy_dim,
        }

    @property
    def layer_sets(self) -> dict[str, Sequence[int]]:
        sets = super().layer_sets
        return {**sets, "indexer_layers": sets["full_layers"]}

    @property
    def horizons(self) -> frozenset[int]:
        selected = {self.region_block_size * self.topk} if self.layer_sets["indexer_layers"] else set()
        return super().horizons | selected


REGION_INDEXER = (
    Map("sparse_indexer_q.weight", "indexer.q.kernel", "(index_heads index_dim) D -> D index_heads index_dim"),
    Map("sparse_indexer_q_norm.weight", "indexer.q_norm.scale", "index_dim"),
    Map("sparse_indexer_k.weight", "indexer.k.kernel", "index_dim D -> D index_dim"),
    Map("sparse_indexer_k_norm.weight", "indexer.k_norm.scale", "index_dim"),
    Map("sparse_indexer_k_norm.bias", "indexer.k_norm.bias", "index_dim"),
    Map("sparse_indexer_w.weight", "indexer.router.kernel", "index_heads D -> D index_heads"),
    Map("sparse_indexer_z.weight", "indexer.router_gate.kernel", "index_dim D -> D index_dim"),
    Map("ssmax_s", "growth", "full_heads"),
)
"""An indexer, and how scores would grow with the logarithm of the length (arXiv:2501.19399), which servers load and
nothing reads."""

TABLE = step3p5.TABLE.with_rows(
    (
        *step3p5.TABLE,
        *under("model.layers.{indexer_layers}.self_attn", "layers.{indexer_layers}.attn", *REGION_INDEXER),
    )
)

FAMILY = family(Config, TABLE, "Step-5-Preview, the text model", "Step4ForCausalLM")
