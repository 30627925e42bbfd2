"""Qwen2, Qwen3 and the models around them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Self

from tpuconv.models.common.both_ways import EitherWay
from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.kinds import faults_of_kinds
from tpuconv.models.common.mrope import MropeConfig
from tpuconv.models.common.rows import (
    FURTHER_TOKENS,
    IN_FIRST_EXPERTS,
    PROBABLE_EXPERTS,
    SHARED_AND_PROBABLE_EXPERTS,
    STACKED_EXPERTS,
    decoder_table,
    mlp_rows,
    when,
)
from tpuconv.models.common.sparse import ChosenExperts, FurtherLayers, MixedMLPs, stepped_mlp_kinds
from tpuconv.models.common.thinker import ThinkerConfig, thinker_table
from tpuconv.models.common.windows import WINDOW_KINDS, WindowedConfig, windows_by_kind
from tpuconv.models.common.wrapper import BRINGS, SEES, WrapperConfig, inside
from tpuconv.models.declare import decoder, wrapper
from tpuconv.models.lineages.llama import ARCEE
from tpuconv.models.parts import Attn, Experts, Mlp, Mtp, Norms
from tpuconv.models.towers.packed_vit.family import COSMOS3_EDGE_VISION
from tpuconv.models.towers.qwen_audio.family import QWEN3_OMNI_AUDIO, QWEN25_OMNI_AUDIO
from tpuconv.models.towers.qwen_vit.modalities import (
    COSMOS3_VISION,
    QWEN2_VISION,
    QWEN3_OMNI_VISION,
    QWEN3_VISION,
    QWEN25_OMNI_VISION,
    QWEN25_VISION,
)
from tpuconv.models.towers.siglip2.family import KEYE15_VISION, KEYE_VISION
from tpuconv.notation.spelling import aliases
from tpuconv.notation.table import Map, MappingTable, under

QWEN2 = decoder(
    "qwen2",
    "Qwen2, Qwen2.5",
    "Qwen2ForCausalLM",
    Norms(between=True),
    Attn(True, out_bias=False),
    Mlp(),
    config=(EitherWay, WindowedConfig),
)


class LayersBeside(FurtherLayers):
    """The layers for multi-token prediction have numbers of their own."""

    @property
    def layer_sets(self) -> dict[str, Sequence[int]]:
        return {**super().layer_sets, "U": tuple(range(self.num_nextn_predict_layers))}


MIMO = QWEN2.but(
    "mimo",
    "MiMo-7B",
    "MiMoForCausalLM",
    Mtp(),
    config=(LayersBeside, QWEN2.config),
    keys={"num_nextn_predict_layers": int},
    defaults={"num_nextn_predict_layers": 0},
    least={"num_nextn_predict_layers": 0},
    only={"attention_bias": (True,)},
    others=under(
        "model.mtp_layers.{U}",
        "mtp.{U}",
        *(row for part in QWEN2.parts for row in part.table_rows),
        Map("token_layernorm.weight", "embed_norm.scale", "D"),
        Map("hidden_layernorm.weight", "hidden_norm.scale", "D"),
        Map("input_proj.weight", ("from_hidden.kernel", "from_embed.kernel"), "D (A + A) -> A D, A D"),
        Map("final_layernorm.weight", "norm.scale", "D"),
    ),
    ignore={"model.mtp_layers.*": FURTHER_TOKENS},
)

QWEN3 = decoder(
    "qwen3",
    "Qwen3, dense",
    "Qwen3ForCausalLM",
    Norms(between=True),
    Attn("attention_bias", norms="each head"),
    Mlp(),
    config=(EitherWay, WindowedConfig),
    keys={"head_dim": int},
)


@family_config
class Qwen3MoeConfig(ChosenExperts, MixedMLPs, DecoderConfig):
    """`max_window_layers` has no effect, other than in the dense Qwen3: the window applies to all layers."""

    synonyms: ClassVar[Mapping[str, str]] = {"num_local_experts": "num_experts"}
    least: ClassVar[Mapping[str, int]] = {"max_window_layers": 0}

    decoder_sparse_step: int
    mlp_only_layers: tuple[int, ...] | None
    use_sliding_window: bool
    sliding_window: int | None
    max_window_layers: int | None = None

    @property
    def mlp_kinds(self) -> tuple[str, ...]:
        return stepped_mlp_kinds(self.mlp_only_layers or (), self.decoder_sparse_step, self.num_hidden_layers)

    @property
    def windows(self) -> tuple[int | None, ...]:
        return (self.sliding_window if self.use_sliding_window else None,) * self.num_hidden_layers


PROBABLE_KEYS = ("moe_intermediate_size", "num_experts", "num_experts_per_tok", "norm_topk_prob")

QWEN3_MOE = decoder(
    "qwen3_moe",
    "Qwen3, mixture of experts",
    "Qwen3MoeForCausalLM",
    Norms(),
    Attn("attention_bias", norms="each head"),
    Experts(
        layers="some or all",
        module="modules.experts:ProbableExperts",
        rows=PROBABLE_EXPERTS,
        keys=PROBABLE_KEYS,
    ),
    config=Qwen3MoeConfig,
)


@family_config
class Qwen2MoeConfig(Qwen3MoeConfig):
    """Without `layer_types` every second layer below `max_window_layers` has the window, if it is used."""

    least: ClassVar = {"max_window_layers": 0, "sliding_window": 0}
    only: ClassVar = {"attention_bias": (False,)}

    attention_bias: bool = False
    layer_types: tuple[str, ...] | None

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        yield from faults_of_kinds("layer_types", self.kinds, self.num_hidden_layers, WINDOW_KINDS)
        if "sliding_attention" in self.kinds and not (self.use_sliding_window and self.sliding_window):
            yield (
                f"layers have 'sliding_attention' with use_sliding_window={self.use_sliding_window} and "
                f"sliding_window={self.sliding_window}"
            )

    @property
    def kinds(self) -> tuple[str, ...]:
        """The `layer_types` of all layers."""
        if self.layer_types is not None:
            return self.layer_types
        below = self.max_window_layers or 0 if self.use_sliding_window else 0
        layers = range(self.num_hidden_layers)
        return tuple("sliding_attention" if i % 2 == 0 and i < below else "full_attention" for i in layers)

    @property
    def windows(self) -> tuple[int | None, ...]:
        return windows_by_kind(self.kinds, self.sliding_window)


QWEN2_MOE = decoder(
    "qwen2_moe",
    "Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B",
    "Qwen2MoeForCausalLM",
    Norms(),
    Attn("qkv_bias", out_bias=False),
    Experts(
        layers="some or all",
        module="modules.experts:SharedAndProbableExperts",
        rows=SHARED_AND_PROBABLE_EXPERTS,
        keys=(*PROBABLE_KEYS, "shared_expert_intermediate_size"),
    ),
    config=Qwen2MoeConfig,
)


class TiedInside(WrapperConfig):
    """Reads `text_config`, which releases have at the root. As transformers does, it counts a true
    `tie_word_embeddings` inside although the root says false."""

    flat: ClassVar[bool] = True

    def contradictions(self) -> Iterator[str]:
        """See `DecoderConfig.contradictions`."""
        yield from super().contradictions()  # type: ignore[misc]
        config: Any = self
        if config.head_dim is not None and config.head_dim * config.num_attention_heads != config.hidden_size:
            yield f"head_dim={config.head_dim} is not hidden_size / num_attention_heads, which transformers takes"

    @classmethod
    def _is_tied(cls, raw: Mapping[str, Any]) -> Any:
        text = raw.get("text_config")
        inside = text.get("tie_word_embeddings") if isinstance(text, Mapping) else None
        return True if inside is True else super()._is_tied(raw)


QWEN2_5_VL = wrapper(
    "qwen2_5_vl",
    "Qwen2.5-VL",
    "Qwen2_5_VLForConditionalGeneration",
    text=QWEN2,
    reads=TiedInside,
    mixins=(MropeConfig,),
    prefix="model.",
    default_sections=(16, 24, 24),
    modalities=(QWEN25_VISION,),
)

QWEN2_VL = wrapper(
    "qwen2_vl",
    "Qwen2-VL, QVQ",
    "Qwen2VLForConditionalGeneration",
    text=QWEN2,
    reads=TiedInside,
    mixins=(MropeConfig,),
    prefix="model.",
    default_sections=(16, 24, 24),
    modalities=(QWEN2_VISION,),
)

QWEN2_5_OMNI = wrapper(
    "qwen2_5_omni",
    "Qwen2.5-Omni, text of the thinker",
    "Qwen2_5OmniForConditionalGeneration",
    "Qwen2_5OmniModel",
    text=QWEN2,
    reads=ThinkerConfig,
    mixins=(MropeConfig,),
    types={"Qwen2_5OmniThinkerForConditionalGeneration": "qwen2_5_omni_thinker"},
    table=thinker_table(QWEN2.table, "talker", "token2wav"),
    defaults={"tie_word_embeddings": False},
    default_sections=(16, 24, 24),
    modalities=(QWEN25_OMNI_VISION, QWEN25_OMNI_AUDIO),
)

WITHOUT_WINDOW = {"use_sliding_window": (False, None)}

QWEN3_VL = wrapper(
    "qwen3_vl",
    "Qwen3-VL, dense",
    "Qwen3VLForConditionalGeneration",
    text=QWEN3,
    mixins=(MropeConfig,),
    only=WITHOUT_WINDOW,
    interleaved=True,
    default_sections=(24, 20, 20),
    modalities=(QWEN3_VISION,),
)

LIKE_KEYE = partial(
    wrapper,
    text=QWEN3,
    mixins=(MropeConfig,),
    prefix="model.",
    flat=True,
    only=WITHOUT_WINDOW,
    default_sections=(16, 24, 24),
)
KEYE = LIKE_KEYE("Keye", "Keye-VL, with code of its own", "KeyeForConditionalGeneration", modalities=(KEYE_VISION,))
KEYEVL1_5 = LIKE_KEYE(
    "KeyeVL1_5",
    "Keye-VL 1.5, with code of its own",
    "KeyeVL1_5ForConditionalGeneration",
    modalities=(KEYE15_VISION,),
)

QWEN3_OMNI_MOE = wrapper(
    "qwen3_omni_moe",
    "Qwen3-Omni, text of the thinker",
    "Qwen3OmniMoeForConditionalGeneration",
    text=QWEN3_MOE,
    reads=ThinkerConfig,
    mixins=(MropeConfig,),
    types={"Qwen3OmniMoeThinkerForConditionalGeneration": "qwen3_omni_moe_thinker"},
    table=thinker_table(QWEN3_MOE.table, "talker", "code2wav"),
    only=WITHOUT_WINDOW,
    defaults={"num_attention_heads": 32, "sliding_window": 4096},
    interleaved=True,
    default_sections=(24, 20, 20),
    modalities=(QWEN3_OMNI_VISION, QWEN3_OMNI_AUDIO),
)


class StackedBy(WrapperConfig):
    """Also reads whether transformers 5 wrote the files: it stacks the matrices of experts as (out, in), older releases
    as (in, out)."""

    all_experts: bool
    some_dense: bool
    is_out_major: bool

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        major = str(raw.get("transformers_version", "")).partition(".")[0][:3]
        read: Any = super().from_hf(raw)
        return replace(read, is_out_major=major.isdecimal() and int(major) >= 5)  # type: ignore[no-any-return]

    @property
    def all_in_major(self) -> bool:
        """True if every layer has experts, stacked as (in, out)."""
        return self.all_experts and not self.is_out_major

    @property
    def all_out_major(self) -> bool:
        """True if every layer has experts, stacked as (out, in)."""
        return self.all_experts and self.is_out_major

    @property
    def some_in_major(self) -> bool:
        """True if some layers have experts, stacked as (in, out)."""
        return self.some_dense and not self.is_out_major

    @property
    def some_out_major(self) -> bool:
        """True if some layers have experts, stacked as (out, in)."""
        return self.some_dense and self.is_out_major


STACKED_IN_QWEN3_VL = (
    *mlp_rows(Map("gate.weight", "router.kernel", "E D -> D E")),
    *when("all_in_major", *under("model.layers.{L}.mlp", "layers.{L}.moe", *IN_FIRST_EXPERTS)),
    *when("all_out_major", *under("model.layers.{L}.mlp", "layers.{L}.moe", *STACKED_EXPERTS)),
    *when("some_in_major", *under("model.layers.{J}.mlp", "layers.{J}.moe", *IN_FIRST_EXPERTS)),
    *when("some_out_major", *under("model.layers.{J}.mlp", "layers.{J}.moe", *STACKED_EXPERTS)),
)

QWEN3_VL_MOE = wrapper(
    "qwen3_vl_moe",
    "Qwen3-VL with experts",
    "Qwen3VLMoeForConditionalGeneration",
    text=QWEN3_MOE,
    reads=StackedBy,
    mixins=(MropeConfig,),
    table=inside(
        decoder_table(*(row for part in QWEN3_MOE.parts for row in part.table_rows), others=STACKED_IN_QWEN3_VL),
        "model.language_model.",
        {"visual": SEES},
    ),
    derived=QWEN3_MOE.config.derived | {"is_out_major"},
    only={**WITHOUT_WINDOW, "norm_topk_prob": (True,)},
    keys={"is_out_major": bool},
    defaults={"norm_topk_prob": True, "is_out_major": False, "tie_word_embeddings": False},
    interleaved=True,
    default_sections=(24, 20, 20),
    modalities=(QWEN3_VISION,),
)

GENERATES = "generator of images, sound or actions: the text model alone is converted"
GENERATOR = dict.fromkeys(
    (
        *("*moe_gen*", "*_for_gen.*", "*.self_attn.add_*", "*.self_attn.to_add_out.*", "*.self_attn.norm_added_*"),
        *("*proj_in.*", "*proj_out.*", "*time_embedder.*", "*_modality_embed"),
    ),
    GENERATES,
)
"""The tensors beside the text model in releases of Cosmos."""

COSMOS_NAMES = {
    **{f"self_attn.{x}_proj.": f"self_attn.to_{x}." for x in "qkv"},
    "self_attn.o_proj.": "self_attn.to_out.",
    "self_attn.q_norm.": "self_attn.norm_q.",
    "self_attn.k_norm.": "self_attn.norm_k.",
}
"""Parts of names, and those that newer releases have for them."""


def cosmos_name(name: str) -> str:
    """Returns the name that newer releases have for a tensor of a text model."""
    for old, new in COSMOS_NAMES.items():
        name = name.replace(old, new)
    return name


def cosmos_table(text: MappingTable, outside: Mapping[str, str]) -> MappingTable:
    """Returns the table of a text model with the names of newer releases; `outside` is as in `inside`."""
    return inside(text.renamed(cosmos_name), "", outside, tensors=GENERATOR, head="lm_head.")


COSMOS3_OMNI = wrapper(
    "cosmos3_omni",
    "Cosmos 3",
    "Cosmos3OmniForConditionalGeneration",
    text=QWEN3,
    mixins=(MropeConfig,),
    table=cosmos_table(
        QWEN3.table,
        {
            **dict.fromkeys(("visual", "blocks", "patch_embed", "deepstack_merger_list"), SEES),
            **dict.fromkeys(("pos_embed", "merger"), BRINGS),
        },
    ),
    only=WITHOUT_WINDOW,
    default_rope={"rope_theta": 500000.0},
    defaults={"max_position_embeddings": 128000},
    modules=aliases(QWEN3.table, cosmos_name),
    interleaved=True,
    default_sections=(24, 20, 20),
    modalities=(COSMOS3_VISION,),
)

COSMOS3_EDGE = wrapper(
    "cosmos3_edge",
    "Cosmos 3 Edge",
    "Cosmos3EdgeForConditionalGeneration",
    text=ARCEE,
    mixins=(MropeConfig,),
    table=cosmos_table(ARCEE.table, {"visual": SEES, "projector": BRINGS}),
    modules=aliases(ARCEE.table, cosmos_name),
    interleaved=True,
    default_sections=(24, 20, 20),
    modalities=(COSMOS3_EDGE_VISION,),
)
