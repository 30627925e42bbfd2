"""GPT-J: config and mapping table."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from tpuconv.mapping.table import Map
from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.gpt import GELU_TANH, GPT_KEYS, gpt_table, norm_rows
from tpuconv.models.registry import family


@family_config
class Config(DecoderConfig):
    """The keys of config.json. Without `n_inner` an MLP is four times as wide as the model."""

    model_type: ClassVar[str] = "gptj"
    only: ClassVar = {
        "activation_function": GELU_TANH,
        "rotary": (True,),
        "scale_attn_weights": (True,),
        "tie_word_embeddings": (False,),
    }
    hf_names: ClassVar[Mapping[str, str]] = GPT_KEYS
    derived: ClassVar[frozenset[str]] = DecoderConfig.derived | {"head_dim"}

    intermediate_size: int | None  # type: ignore[assignment]  # others' is never absent
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    rotary_dim: int

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.num_key_value_heads not in (None, self.num_attention_heads):
            yield f"num_key_value_heads={self.num_key_value_heads} is not n_head={self.num_attention_heads}"
        if self.rotary_dim > self.axes["H"]:
            yield f"rotary_dim={self.rotary_dim} is more than a head has"

    @property
    def axes(self) -> dict[str, Any]:
        return {**super().axes, "F": self.intermediate_size or 4 * self.hidden_size}

    @property
    def rope_dim(self) -> int:
        return self.rotary_dim

    @property
    def has_head_bias(self) -> bool:
        return self.has_lm_head


UNFUSED_ROWS = (
    *norm_rows("ln_1", "norm"),
    Map("attn.out_proj.weight", "attn.o.kernel", "D (N H) -> N H D"),
    Map("mlp.fc_in.weight", "mlp.up.kernel", "F D -> D F"),
    Map("mlp.fc_in.bias", "mlp.up.bias", "F"),
    Map("mlp.fc_out.weight", "mlp.down.kernel", "D F -> F D"),
    Map("mlp.fc_out.bias", "mlp.down.bias", "D"),
)
"""The rows of a layer besides queries, keys and values, which CodeGen has in one matrix."""
HEAD_ROWS = (Map("lm_head.bias", "lm_head.bias", "V", when="has_head_bias"),)

TABLE = gpt_table(
    (
        Map("attn.q_proj.weight", "attn.q.kernel", "(N H) D -> D N H"),
        Map("attn.k_proj.weight", "attn.k.kernel", "(K H) D -> D K H"),
        Map("attn.v_proj.weight", "attn.v.kernel", "(K H) D -> D K H"),
        *UNFUSED_ROWS,
    ),
    head=HEAD_ROWS,
)

FAMILY = family(Config, TABLE, "GPT-J 6B", "GPTJForCausalLM")
