"""The decoder of ModernBERT: config and mapping table."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.rope import PLAIN_ROPE, Rope, rope_of_layers
from tpuconv.models.common.rows import when
from tpuconv.models.common.windows import ROPES_BY_KIND, TwoRopesConfig
from tpuconv.models.registry import family
from tpuconv.notation.table import Map, MappingTable, under

BASE_KEYS = {"full_attention": "global_rope_theta", "sliding_attention": "local_rope_theta"}
"""The keys of the bases of rotary positions in a config.json without `rope_parameters`."""

MODERNBERT_LEFT_OUT = frozenset(
    {
        "num_key_value_heads",  # as many as queries
        "sliding_window",  # half of `local_attention`
        *("cls_token_id", "sep_token_id", "initializer_cutoff_factor", "mlp_dropout", "embedding_dropout"),
    }
)


@family_config
class Config(TwoRopesConfig):
    """The keys of config.json. `local_attention` counts a window in both directions, as ModernBERT's encoder has it."""

    model_type: ClassVar[str] = "modernbert-decoder"
    hf_names: ClassVar[Mapping[str, str]] = {"rms_norm_eps": "norm_eps", "sliding_window": "local_attention"}
    derived: ClassVar[frozenset[str]] = TwoRopesConfig.derived | {"num_key_value_heads", "head_dim"}
    only: ClassVar = {"hidden_activation": ("gelu",), "classifier_activation": ("gelu",)}
    left_out: ClassVar[frozenset[str]] = MODERNBERT_LEFT_OUT
    least: ClassVar[Mapping[str, int]] = {"sliding_window": 2}

    norm_bias: bool
    attention_bias: bool
    mlp_bias: bool
    classifier_bias: bool
    decoder_bias: bool
    global_attn_every_n_layers: int = 3
    global_rope_theta: float = 160_000.0
    local_rope_theta: float = 10_000.0
    rope: Rope = Rope(theta=160_000.0)
    local_rope: Rope = PLAIN_ROPE

    @classmethod
    def read_ropes(cls, raw: Mapping[str, Any], context: int) -> dict[str, Any]:
        """As `DecoderConfig.read_ropes`, of older files too."""
        out = {}
        for kind, field in ROPES_BY_KIND.items():
            theta = raw.get(BASE_KEYS[kind])
            default = getattr(cls, BASE_KEYS[kind]) if theta is None else theta
            own = rope_of_layers(raw, kind, default, raw.get("rope_scaling"))
            out[field] = Rope.from_hf(own, cls.model_type, context)
        return out

    @property
    def kinds(self) -> tuple[str, ...]:
        if self.layer_types is not None:
            return self.layer_types
        every = self.global_attn_every_n_layers
        return tuple("sliding_attention" if i % every else "full_attention" for i in range(self.num_hidden_layers))

    @property
    def windows(self) -> tuple[int | None, ...]:
        return tuple(window and window // 2 for window in super().windows)

    @property
    def layer_sets(self) -> dict[str, Sequence[int]]:
        return {**super().layer_sets, "later_layers": range(1, self.num_hidden_layers)}

    @property
    def has_logits(self) -> bool:
        """True if hidden states pass a layer before the logits."""
        return not self.head.kind

    @property
    def has_logit_bias(self) -> bool:
        """True if the logits have a bias."""
        return self.has_logits and self.decoder_bias

    @property
    def sizes(self) -> dict[str, int]:
        return {**super().sizes, "A": self.hidden_size}


def layer_norm_rows(hf: str, jax: str) -> tuple[Map, ...]:
    """Returns the rows of a layer norm."""
    return Map(f"{hf}.weight", f"{jax}.scale", "D"), Map(f"{hf}.bias", f"{jax}.bias", "D", when="norm_bias")


MODERNBERT_ROWS = (
    Map("attn.q_proj.weight", "attn.q.kernel", "(N H) D -> D N H"),
    Map("attn.k_proj.weight", "attn.k.kernel", "(K H) D -> D K H"),
    Map("attn.v_proj.weight", "attn.v.kernel", "(K H) D -> D K H"),
    Map("attn.Wo.weight", "attn.o.kernel", "D (N H) -> N H D"),
    *when(
        "attention_bias",
        Map("attn.q_proj.bias", "attn.q.bias", "(N H) -> N H"),
        Map("attn.k_proj.bias", "attn.k.bias", "(K H) -> K H"),
        Map("attn.v_proj.bias", "attn.v.bias", "(K H) -> K H"),
        Map("attn.Wo.bias", "attn.o.bias", "D"),
    ),
    *layer_norm_rows("mlp_norm", "mlp_norm"),
    Map("mlp.Wi.weight", ("mlp.gate.kernel", "mlp.up.kernel"), "(F + F) D -> D F, D F"),
    Map("mlp.Wo.weight", "mlp.down.kernel", "D F -> F D"),
    *when(
        "mlp_bias",
        Map("mlp.Wi.bias", ("mlp.gate.bias", "mlp.up.bias"), "(F + F) -> F, F"),
        Map("mlp.Wo.bias", "mlp.down.bias", "D"),
    ),
)

TABLE = MappingTable(
    (
        Map("model.embeddings.tok_embeddings.weight", "embed.embedding", "V D"),
        *layer_norm_rows("model.embeddings.norm", "embed_norm"),
        *under("model.layers.{later_layers}", "layers.{later_layers}", *layer_norm_rows("attn_norm", "attn_norm")),
        *under("model.layers.{L}", "layers.{L}", *MODERNBERT_ROWS),
        *layer_norm_rows("model.final_norm", "norm"),
        Map("lm_head.dense.weight", "norm.dense.kernel", "D A -> A D", when="has_logits"),
        Map("lm_head.dense.bias", "norm.dense.bias", "D", when="has_logits and classifier_bias"),
        Map("lm_head.norm.weight", "norm.head_norm.scale", "D", when="has_logits"),
        Map("lm_head.norm.bias", "norm.head_norm.bias", "D", when="has_logits and norm_bias"),
        Map("decoder.weight", "lm_head.kernel", "V D -> D V", when="has_lm_head"),
        Map("decoder.bias", "logit_bias.bias", "V", when="has_logit_bias"),
    ),
    copies={"decoder.weight": "model.embeddings.tok_embeddings.weight"},
)

FAMILY = family(Config, TABLE, "the decoder of ModernBERT, as in Ettin", "ModernBertDecoderForCausalLM")
