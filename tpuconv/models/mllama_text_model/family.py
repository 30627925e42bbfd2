"""The text model of Llama 3.2 Vision: config and mapping table."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import ClassVar

from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.rows import ATTENTION, ATTN_NORM, HEAD_NORMS, MLP, MLP_NORM
from tpuconv.models.registry import family
from tpuconv.notation.letters import Word, declare
from tpuconv.notation.table import Map, MappingTable, under

declare(
    token_rows=Word("rows of the embedding, in a model whose head has fewer", as_="V"),
    text_layers=Word("layers whose tokens attend to each other, in a model where others attend to images"),
    cross_layers=Word("layers whose tokens attend to images"),
)

MEDIA_ROWS = 8
"""The rows of the embedding behind the vocabulary, of which the first is the placeholder of an image."""


@family_config
class Config(DecoderConfig):
    """The keys of config.json. Heads are as wide as they can be together."""

    model_type: ClassVar[str] = "mllama_text_model"
    only: ClassVar = {"tie_word_embeddings": (False,)}
    derived: ClassVar[frozenset[str]] = DecoderConfig.derived | {"head_dim"}
    left_out: ClassVar[frozenset[str]] = frozenset({"dropout"})

    cross_attention_layers: tuple[int, ...] | None

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if not self.layer_sets["text_layers"]:
            yield "cross_attention_layers has all layers"

    @property
    def sizes(self) -> dict[str, int]:
        return {**super().sizes, "token_rows": self.vocab_size + MEDIA_ROWS}

    @property
    def layer_sets(self) -> dict[str, Sequence[int]]:
        found = self.cross_attention_layers
        layers, cross = range(self.num_hidden_layers), set(range(3, 40, 5) if found is None else found)
        return {
            **super().layer_sets,
            "text_layers": tuple(i for i in layers if i not in cross),
            "cross_layers": tuple(i for i in layers if i in cross),
        }

    @property
    def attends_to_images(self) -> bool:
        return bool(self.layer_sets["cross_layers"])


def across(row: Map) -> Map:
    """Returns the row of attention to images, of the row of a layer's attention."""
    return replace(row, hf=tuple(name.replace("self_attn.", "cross_attn.") for name in row.hf_names))


FED = (MLP_NORM, *under("mlp", "mlp", *MLP))
TABLE = MappingTable(
    (
        Map("model.embed_tokens.weight", "embed.embedding", "token_rows D"),
        *under("model.layers.{text_layers}", "layers.{text_layers}", ATTN_NORM, *ATTENTION, *FED),
        *under(
            "model.layers.{cross_layers}",
            "layers.{cross_layers}",
            ATTN_NORM,
            *map(across, (*ATTENTION, *HEAD_NORMS)),
            Map("cross_attn_attn_gate", "attn_gate", "1"),
            *FED,
            Map("cross_attn_mlp_gate", "mlp_gate", "1"),
        ),
        Map("model.norm.weight", "norm.scale", "D"),
        Map("lm_head.weight", "lm_head.kernel", "V D -> D V", when="has_lm_head"),
    ),
    copies={"lm_head.weight": "model.embed_tokens.weight"},
)

FAMILY = family(Config, TABLE, "Llama 3.2 Vision, the text model on its own", "MllamaForCausalLM")
