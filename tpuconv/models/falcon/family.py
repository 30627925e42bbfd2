"""Falcon: config and mapping table."""

from collections.abc import Iterator, Mapping
from typing import ClassVar

from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.gpt import GPT_QKV, GPT_QKV_BIAS, norm_rows
from tpuconv.models.common.rope import Rope
from tpuconv.models.common.rows import when
from tpuconv.models.registry import family
from tpuconv.notation.table import Map, MappingTable, under


@family_config
class Config(DecoderConfig):
    """The keys of config.json. `new_decoder_architecture` is set in Falcon 40B and later: attention and MLP side by
    side, and groups of heads. Without it `multi_query` says that all heads share one key and one value, whatever
    `num_kv_heads` is. With `alibi` attention is biased by distance, and there are no rotary positions."""

    model_type: ClassVar[str] = "falcon"
    only: ClassVar = {"activation": ("gelu",)}
    hf_names: ClassVar[Mapping[str, str]] = {
        "intermediate_size": "ffn_hidden_size",
        "num_key_value_heads": "num_kv_heads",
        "rms_norm_eps": "layer_norm_epsilon",
        "attention_bias": "bias",
        "use_parallel_residual": "parallel_attn",
    }

    intermediate_size: int | None  # type: ignore[assignment]  # others' is never absent
    new_decoder_architecture: bool
    multi_query: bool
    use_parallel_residual: bool
    num_ln_in_parallel_attn: int | None
    attention_bias: bool
    alibi: bool | None

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.new_decoder_architecture and not self.use_parallel_residual:
            yield "parallel_attn=False with new_decoder_architecture=True, whose attention and MLP are side by side"
        if (norms := self.num_ln_in_parallel_attn) not in (None, 1, *[2] * self.new_decoder_architecture):
            yield f"num_ln_in_parallel_attn={norms}, with new_decoder_architecture={self.new_decoder_architecture}"

    @property
    def sizes(self) -> dict[str, int]:
        heads = self.num_attention_heads
        kv_heads = self.num_key_value_heads or heads
        if not self.new_decoder_architecture:
            kv_heads = 1 if self.multi_query else heads
        width = self.intermediate_size or 4 * self.hidden_size
        return {**super().sizes, "K": kv_heads, "G": heads // kv_heads, "F": width}

    @property
    def ropes(self) -> tuple[Rope | None, ...]:
        return (None if self.alibi else self.rope,) * self.num_hidden_layers

    @property
    def one_norm(self) -> bool:
        """True if attention and MLP have the same norm."""
        return self.use_parallel_residual and not self.two_norms

    @property
    def two_norms(self) -> bool:
        """True if attention and MLP are parallel, each after a norm of its own."""
        return self.new_decoder_architecture and self.num_ln_in_parallel_attn != 1


TABLE = MappingTable(
    (
        Map("transformer.word_embeddings.weight", "embed.embedding", "V D"),
        *under(
            "transformer.h.{L}",
            "layers.{L}",
            *when("one_norm", *norm_rows("input_layernorm", "norm")),
            *when("two_norms", *norm_rows("ln_attn", "attn_norm"), *norm_rows("ln_mlp", "mlp_norm")),
            *when(
                "not use_parallel_residual",
                *norm_rows("input_layernorm", "attn_norm"),
                *norm_rows("post_attention_layernorm", "mlp_norm"),
            ),
            # The key and the value of a group follow its queries. All heads are one group with `multi_query`, and each
            # is one without.
            Map("self_attention.query_key_value.weight", GPT_QKV, "(K (G + 1 + 1) H) D -> D (K G) H, D K H, D K H"),
            Map("self_attention.dense.weight", "attn.o.kernel", "D (N H) -> N H D"),
            Map("mlp.dense_h_to_4h.weight", "mlp.up.kernel", "F D -> D F"),
            Map("mlp.dense_4h_to_h.weight", "mlp.down.kernel", "D F -> F D"),
            *when(
                "attention_bias",
                Map("self_attention.query_key_value.bias", GPT_QKV_BIAS, "(K (G + 1 + 1) H) -> (K G) H, K H, K H"),
                Map("self_attention.dense.bias", "attn.o.bias", "D"),
                Map("mlp.dense_h_to_4h.bias", "mlp.up.bias", "F"),
                Map("mlp.dense_4h_to_h.bias", "mlp.down.bias", "D"),
            ),
        ),
        *norm_rows("transformer.ln_f", "norm"),
        Map("lm_head.weight", "lm_head.kernel", "V D -> D V", when="has_lm_head"),
    ),
    copies={"lm_head.weight": "transformer.word_embeddings.weight"},
)

FAMILY = family(Config, TABLE, "Falcon 7B, 11B, 40B, 180B, Falcon-RW", "FalconForCausalLM")
