"""Gemma 4's assistants: config and mapping table of a draft model.

A draft has layers of Gemma 4 without keys and values of their own: each reads the keys and values of the last layer of
its kind that the target computes. Its input is the embedding of the last token and a hidden state, both of the target's
width. Embeddings may be grouped in clusters, of which the most likely ones alone have logits.
"""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from tpuconv.errors import UsageError
from tpuconv.models.common.config_keys import unnested
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.rows import MLP, SANDWICH_NORMS, decoder_table, when
from tpuconv.models.gemma4_text import family as gemma4_text
from tpuconv.models.registry import draft_family
from tpuconv.notation.letters import Word, declare
from tpuconv.notation.table import Map, under

declare(
    target_width=Word("width of the hidden states of a draft's target"),
    target_pair=Word("width of an embedding and a hidden state of the target together"),
    clusters=Word("clusters of the embeddings of a draft"),
)

ASSISTANT, UNIFIED = "gemma4_assistant", "gemma4_unified_assistant"
UNIFIED_WIDTH = 3840
"""The `backbone_hidden_size` of a Gemma 4 without towers, where config.json has none."""


@family_config
class Config(gemma4_text.Config):
    """The keys of config.json, the keys of `text_config` beside the others."""

    model_type: ClassVar[str] = ASSISTANT
    only: ClassVar = {
        **gemma4_text.Config.only,
        "enable_moe_block": (False,),
        "hidden_size_per_layer_input": (0,),
        "use_double_wide_mlp": (False,),
        "tie_word_embeddings": (True,),
        "use_bidirectional_attention": (None, "vision"),  # without effect
    }
    left_out: ClassVar[frozenset[str]] = gemma4_text.Config.left_out | {
        "num_kv_shared_layers",
        "vocab_size_per_layer_input",
    }

    backbone_hidden_size: int = 1536
    use_ordered_embeddings: bool = False
    num_centroids: int = 2048
    centroid_intermediate_top_k: int = 32
    tie_word_embeddings: bool = True
    enable_moe_block: bool = False
    use_double_wide_mlp: bool = False
    hidden_size_per_layer_input: int = 0

    @classmethod
    def in_our_keys(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        tied = {"tie_word_embeddings": raw.get("tie_word_embeddings", True)}
        width = {"backbone_hidden_size": UNIFIED_WIDTH} if raw.get("model_type") == UNIFIED else {}
        return super().in_our_keys({**width, **unnested(raw, "text_config"), **tied})

    def disagreements(self, raw: Mapping[str, Any]) -> Iterator[str]:
        yield from super().disagreements(raw)
        shared = unnested(raw, "text_config").get("num_kv_shared_layers")
        if shared not in (None, 0, self.num_hidden_layers):
            yield f"num_kv_shared_layers={shared}, and all {self.num_hidden_layers} layers read the target's keys"

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.use_ordered_embeddings and self.vocab_size % self.num_centroids:
            yield f"vocab_size={self.vocab_size} is not a multiple of num_centroids={self.num_centroids}"
        elif self.use_ordered_embeddings and self.centroid_intermediate_top_k > self.num_centroids:
            yield f"centroid_intermediate_top_k={self.centroid_intermediate_top_k} of {self.num_centroids} clusters"

    @property
    def sizes(self) -> dict[str, int]:
        width = self.backbone_hidden_size
        return {
            **super().sizes,
            "target_width": width,
            "target_pair": 2 * width,
            "clusters": self.num_centroids,
        }

    @property
    def kv_sources(self) -> tuple[int, ...]:
        """No layer has keys and values of its own."""
        return (-1,) * self.num_hidden_layers

    @property
    def inseparable(self) -> str:
        return "its layers use the keys and values of another model"

    def states_of(self, layers: int) -> tuple[int, ...]:
        """See `DraftConfig.states_of`: the output of the last layer."""
        return (layers,)

    def sizes_beside(self, target: Any) -> Mapping[str, tuple[int, int]]:
        """See `DraftConfig.sizes_beside`."""
        if not isinstance(target, gemma4_text.Config) or set(self.kinds) - set(target.last_keys):
            raise UsageError(
                f"an assistant of Gemma 4 reads keys and values, which {target.model_type} does not have",
                hint="give a model of Gemma 4",
            )
        names = {
            "vocabulary": "V",
            "head dimension": "H",
            "key-value heads": "K",
            "head dimension of layers that see all tokens": "full_head_dim",
            "key-value heads of layers that see all tokens": "full_kv_heads",
        }
        both = {name: (self.sizes[letter], target.sizes[letter]) for name, letter in names.items()}
        return {**both, "width of the target": (self.backbone_hidden_size, target.hidden_size)}


TABLE = decoder_table(
    *SANDWICH_NORMS,
    Map("layer_scalar", "layer_scalar", "1", buffer=True),
    *under("mlp", "mlp", *MLP),
    others=(
        *gemma4_text.QUERIES_OF_LAYERS,
        Map("pre_projection.weight", "pre_projection.kernel", "D target_pair -> target_pair D"),
        Map("post_projection.weight", "post_projection.kernel", "target_width D -> D target_width"),
        *when(
            "use_ordered_embeddings",
            Map("masked_embedding.centroids.weight", "centroids.kernel", "clusters D -> D clusters"),
            Map("masked_embedding.token_ordering", "token_ordering", "V", buffer=True),
        ),
    ),
)


FAMILY = draft_family(Config, TABLE, "Assistants of Gemma 4", types={"Gemma4UnifiedAssistantForCausalLM": UNIFIED})
