"""Molmo 2: the text model's config and mapping table, and how it sees."""

from typing import ClassVar

from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.gpt import qkv_rows
from tpuconv.models.common.rope import Rope
from tpuconv.models.common.rows import HEAD_NORMS, NORMS_OF_ALL_HEADS, when
from tpuconv.models.common.wrapper import SEES, WrapperConfig, inside
from tpuconv.models.registry import family
from tpuconv.models.towers.molmo.family import MOLMO_VISION
from tpuconv.notation.letters import Word, declare
from tpuconv.notation.table import Map, MappingTable, under

declare(
    added_vocab=Word("rows added to the vocabulary", as_="V"),
)


@family_config
class Config(WrapperConfig, DecoderConfig):
    """The keys of `text_config`. `qk_norm_type` is "qwen3", norms of each head of queries and keys, or "olmo", norms of
    all heads together. With `norm_after` norms follow attention and MLP, in place of preceding them. Layers outside of
    `rope_scaling_layers`, if that is given, have rotary positions without scaling. The head is never tied: it has no
    rows for the `additional_vocab_size` tokens after the vocabulary, which stand for images."""

    model_type: ClassVar[str] = "molmo2"
    only: ClassVar = {"qk_norm_type": ("qwen3", "olmo")}
    left_out: ClassVar[frozenset[str]] = frozenset({"tie_word_embeddings"})
    outside_keys: ClassVar[frozenset[str]] = frozenset({"adapter_config", "vit_config"})

    additional_vocab_size: int
    rope_scaling_layers: tuple[int, ...] | None
    attention_bias: bool
    qk_norm_type: str
    norm_after: bool

    @property
    def sizes(self) -> dict[str, int]:
        return {**super().sizes, "added_vocab": self.additional_vocab_size}

    @property
    def ropes(self) -> tuple[Rope | None, ...]:
        scaled, plain, layers = self.rope_scaling_layers, Rope(theta=self.rope.theta), range(self.num_hidden_layers)
        return tuple(self.rope if scaled is None or layer in scaled else plain for layer in layers)

    @property
    def sees_images(self) -> str:
        return "all"

    @property
    def placeholder_as(self) -> None:
        return None

    @property
    def norms_all_heads(self) -> bool:
        """True if queries and keys are normalized over all heads together."""
        return self.qk_norm_type == "olmo"


MOLMO_ROWS = (
    *qkv_rows("self_attn.att_proj", bias="attention_bias"),
    Map("self_attn.attn_out.weight", "attn.o.kernel", "D (N H) -> N H D"),
    *when("not norms_all_heads", *HEAD_NORMS),
    *when("norms_all_heads", *NORMS_OF_ALL_HEADS),
    Map("mlp.ff_proj.weight", ("mlp.up.kernel", "mlp.gate.kernel"), "(F + F) D -> D F, D F"),
    Map("mlp.ff_out.weight", "mlp.down.kernel", "D F -> F D"),
    *when(
        "not norm_after",
        Map("attn_norm.weight", "attn_norm.scale", "D"),
        Map("ff_norm.weight", "mlp_norm.scale", "D"),
    ),
    *when(
        "norm_after",
        Map("attn_norm.weight", "post_attn_norm.scale", "D"),
        Map("ff_norm.weight", "post_mlp_norm.scale", "D"),
    ),
)

TABLE = inside(
    MappingTable(
        (
            Map("model.wte.embedding", "embed.embedding", "V D"),
            Map("model.wte.new_embedding", "embed.added", "added_vocab D"),
            *under("model.blocks.{L}", "layers.{L}", *MOLMO_ROWS),
            Map("model.ln_f.weight", "norm.scale", "D"),
            Map("lm_head.weight", "lm_head.kernel", "V D -> D V", when="has_lm_head"),
        ),
        recut=[("model.wte.embedding", "model.wte.new_embedding")],
    ),
    "model.transformer.",
    {"vision_backbone": SEES},
    head="lm_head.",
)

FAMILY = family(Config, TABLE, "Molmo 2", "Molmo2ForConditionalGeneration", modalities=(MOLMO_VISION,))
