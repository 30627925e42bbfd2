"""DiffusionGemma: config and mapping table.

A text is written in canvases, blocks of tokens. The encoder, Gemma 4's layers, reads the prompt and each finished
canvas into the cache; its tokens see those before them. The decoder has the same weights but for one factor of each
layer. It makes a canvas of random tokens better step by step: the tokens of a canvas see the cache and each other, and
their embeddings have a part that is made of the logits of the step before (self-conditioning, arXiv:2208.04202).
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.rows import MLP, SANDWICH_NORMS, STACKED_EXPERTS, decoder_table
from tpuconv.models.common.wrapper import BRINGS, SEES, WrapperConfig, inside
from tpuconv.models.gemma4_text import family as gemma4
from tpuconv.models.registry import family
from tpuconv.models.towers.gemma4.family import GEMMA4_VISION
from tpuconv.notation.table import Map, under

CANVAS_LENGTH = "canvas_length"


@family_config
class Config(WrapperConfig, gemma4.Config):
    """The keys of `text_config`, and `canvas_length` beside it: the number of tokens of a canvas. Each layer has
    experts beside its MLP, and layers that see all tokens make their values of the keys."""

    model_type: ClassVar[str] = "diffusion_gemma"
    tied: ClassVar[bool] = True
    outside_keys: ClassVar[frozenset[str]] = frozenset({CANVAS_LENGTH})
    derived: ClassVar[frozenset[str]] = gemma4.Config.derived | {
        *("attention_k_eq_v", "enable_moe_block", "use_double_wide_mlp", "num_kv_shared_layers"),
        *("hidden_size_per_layer_input", "vocab_size_per_layer_input"),
    }
    only: ClassVar = {
        **gemma4.Config.only,
        "tie_word_embeddings": (True,),  # else the decoder has weights of its own
    }
    least: ClassVar[Mapping[str, int]] = {
        "pad_token_id": 0,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
    }

    attention_k_eq_v: bool = True
    enable_moe_block: bool = True
    use_double_wide_mlp: bool = False
    num_kv_shared_layers: int = 0
    hidden_size_per_layer_input: int = 0
    vocab_size_per_layer_input: int = 1
    final_logit_softcapping: float | None = 30.0
    num_experts: int | None = 128  # of the release; transformers needs all three in the file
    top_k_experts: int | None = 8
    moe_intermediate_size: int | None = 704
    canvas_length: int = 256

    @property
    def sees_images(self) -> str:
        return "beyond" if self.use_bidirectional_attention == "vision" else ""

    @classmethod
    def text_of(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        beside = {CANVAS_LENGTH: raw[CANVAS_LENGTH]} if raw.get(CANVAS_LENGTH) is not None else {}
        return {**super().text_of(raw), **beside}


CANVAS_DECODER, TEXT_ENCODER = "model.decoder.", "model.encoder.language_model."

SHARED_TABLE = inside(
    decoder_table(
        *SANDWICH_NORMS,
        *gemma4.EXPERT_PARTS,
        *under("mlp", "mlp", *MLP),
        others=(
            *under("model.layers.{L}", "layers.{L}.moe", *STACKED_EXPERTS),
            *gemma4.ATTENTION_OF_LAYERS,
        ),
    ),
    CANVAS_DECODER,
    {"encoder.vision_tower": SEES, "encoder.embed_vision": BRINGS},
    head="lm_head.",
)
"""The table of what encoder and decoder share. Files have it under the names of the decoder, and may have copies."""

NOT_SHARED = (
    Map(f"{TEXT_ENCODER}layers.{{L}}.layer_scalar", "layers.{L}.layer_scalar", "1", buffer=True),
    Map(f"{CANVAS_DECODER}layers.{{L}}.layer_scalar", "layers.{L}.canvas_scalar", "1", buffer=True),
    Map(f"{CANVAS_DECODER}self_conditioning.pre_norm.weight", "self_conditioning.norm.scale", "D"),
    *under(f"{CANVAS_DECODER}self_conditioning", "self_conditioning.mlp", *MLP),
)

TABLE = replace(
    SHARED_TABLE.with_rows([*SHARED_TABLE.rows, *NOT_SHARED]),
    copies={
        **SHARED_TABLE.copies,
        **{
            x.replace(CANVAS_DECODER, TEXT_ENCODER): x
            for row in SHARED_TABLE.rows
            for x in row.hf_names
            if x.startswith(CANVAS_DECODER)
        },
    },
)

DIFFUSION_VISION = replace(
    GEMMA4_VISION, prefix="model.encoder.vision_tower.", projector_prefix="model.encoder.embed_vision."
)

FAMILY = family(Config, TABLE, "DiffusionGemma", "DiffusionGemmaForBlockDiffusion", modalities=(DIFFUSION_VISION,))
