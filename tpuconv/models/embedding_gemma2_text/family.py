"""EmbeddingGemma 2, the text model on its own: config and mapping table."""

from dataclasses import dataclass, replace
from inspect import get_annotations
from typing import ClassVar

from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.heads import HIDDEN
from tpuconv.models.common.rope import PLAIN_ROPE, Rope
from tpuconv.models.common.rows import SANDWICH_NORMS, decoder_table
from tpuconv.models.gemma4_text import family as gemma4
from tpuconv.models.registry import family
from tpuconv.notation.letters import Word, declare
from tpuconv.notation.table import Map, under

declare(
    sentence_dim=Word("width of the embedding of a text", as_="D"),
)


@dataclass(frozen=True, kw_only=True)
class WithoutFurtherParts(gemma4.Config):
    """Gemma 4 without some of its parts: shared keys and values, wider MLPs, experts, embeddings of tokens for each
    layer, a soft limit of logits."""

    attention_k_eq_v: bool = False
    use_double_wide_mlp: bool = False
    enable_moe_block: bool = False
    num_experts: int | None = None
    top_k_experts: int | None = None
    moe_intermediate_size: int | None = None
    use_bidirectional_attention: str | None = None
    final_logit_softcapping: float | None = None
    vocab_size_per_layer_input: int = 1
    num_kv_shared_layers: int = 0


@family_config
class Config(WithoutFurtherParts):
    """The keys of config.json. `sliding_window` counts the tokens that a token sees on each side of it."""

    model_type: ClassVar[str] = "embedding_gemma2_text"
    sees_behind: ClassVar[bool] = True
    derived: ClassVar[frozenset[str]] = gemma4.Config.derived | {*get_annotations(WithoutFurtherParts)}
    only: ClassVar = {"hidden_activation": ("gelu_pytorch_tanh",), "attention_bias": (False,)}
    least: ClassVar = {"pad_token_id": 0, "num_kv_shared_layers": 0}

    tie_word_embeddings: bool = True
    num_global_key_value_heads: int | None = 1
    rope: Rope = Rope("default", theta=1e6)
    local_rope: Rope = PLAIN_ROPE
    embedding_dim: int

    @property
    def sizes(self) -> dict[str, int]:
        sizes = super().sizes
        return {
            **sizes,
            "full_kv_heads": self.num_global_key_value_heads or sizes["K"],
            "sentence_dim": self.embedding_dim,
        }

    @property
    def windows(self) -> tuple[int | None, ...]:
        return tuple(window and window + 1 for window in super().windows)


def in_ple(row: Map) -> Map:
    """A row of what layers read besides hidden states, whose module has a name here."""
    return replace(row, hf=f"model.ple.{row.hf_names[0].removeprefix('model.')}")


TABLE = decoder_table(
    *SANDWICH_NORMS,
    *under("ple_block", "", *gemma4.LAYER_INPUTS),
    Map("layer_scalar", "layer_scalar", "1", buffer=True),
    others=(
        *gemma4.ATTENTION_OF_LAYERS,
        *gemma4.MLP_OF_LAYERS,
        *map(in_ple, gemma4.INPUTS_OF_LAYERS[1:]),
        Map("model.embedding_projection.weight", "norm.out.kernel", "sentence_dim D -> D sentence_dim"),
    ),
)

FAMILY = family(Config, TABLE, "EmbeddingGemma 2, the text model on its own", "EmbeddingGemma2TextModel", output=HIDDEN)
