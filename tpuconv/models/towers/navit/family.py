"""SigLIP for images of any size, and the projectors behind it: configs and tables."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from tpuconv.errors import ConfigError
from tpuconv.jsonfile import short
from tpuconv.models.common.beside import VISION, Modality, Projector, ProjectorConfig, Tower
from tpuconv.models.common.key_types import object_of
from tpuconv.models.towers.rows import (
    CLIP_LAYERS,
    PATCH_MATRIX,
    joined_heads,
    layer_norm,
    rms_norm,
    with_bias,
    without_bias,
)
from tpuconv.models.towers.siglip.family import ImageConfig
from tpuconv.notation.table import Map, under

NAVIT_MODULES = "tpuconv.models.towers.navit.modules"


@dataclass(frozen=True, kw_only=True)
class OlderNavitConfig(ImageConfig):
    """The keys of Idefics 2."""

    vision_use_head: ClassVar[bool] = False

    patch_size: int = 32


@dataclass(frozen=True, kw_only=True)
class NavitConfig(OlderNavitConfig):
    """The keys of Idefics 3 and SmolVLM, with other defaults."""

    hidden_size: int = 1152
    num_attention_heads: int = 16


NAVIT = Tower(
    "navit",
    "Idefics 3, SmolVLM, Aria",
    NavitConfig,
    (
        *with_bias("embeddings.patch_embedding", "patch", PATCH_MATRIX, "D"),
        Map("embeddings.position_embedding.weight", "positions", "P D"),
        *CLIP_LAYERS,
        *layer_norm("post_layernorm", "norm"),
    ),
    f"{NAVIT_MODULES}:Navit",
)
OLDER_NAVIT = Tower("older_navit", "Idefics 2", OlderNavitConfig, NAVIT.rows, NAVIT.encoder)


@dataclass(frozen=True, kw_only=True)
class JoinedConfig(ProjectorConfig):
    """The keys of the projector of Idefics 3. M is the width of joined patches."""

    scale_factor: int = 2

    @property
    def merge(self) -> int:
        return self.scale_factor

    def check(self, tower: Any) -> None:
        super().check(tower)
        if self.scale_factor > tower.side:
            raise ConfigError(
                f"config.json: scale_factor={self.scale_factor} joins more patches than the {tower.side} of a row"
            )

    def sizes(self, tower: Any) -> dict[str, Any]:
        return {"O": self.out, "M": tower.sizes["D"] * self.scale_factor**2}


JOINED_MATRIX = Projector(
    JoinedConfig, without_bias("modality_projection.proj", "matrix", "O M -> M O"), f"{NAVIT_MODULES}:JoinedMatrix"
)
"""A matrix of joined patches."""


@dataclass(frozen=True, kw_only=True)
class PerceiverConfig(ProjectorConfig):
    """The keys of `perceiver_config` of Idefics 2. Q counts the latent vectors, which attend with G heads of width E;
    keys have K heads. J counts layers, W is the width of the MLP before them, R of theirs."""

    text_width: int
    perceiver_hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    resampler_n_latents: int = 64
    resampler_depth: int = 3
    resampler_n_heads: int = 16
    resampler_head_dim: int = 96
    num_key_value_heads: int = 4

    @classmethod
    def from_hf(cls, outer: Mapping[str, Any], tower: Any, text: Any) -> Self:
        inside = object_of(outer, "perceiver_config")
        if inside.get("hidden_size", 4096) != text.hidden_size:  # as transformers takes such files
            inside = {**inside, "rms_norm_eps": text.rms_norm_eps}
        act = {"perceiver_hidden_act": inside["hidden_act"]} if "hidden_act" in inside else {}  # not the tower's
        return super().from_hf({**inside, **act}, tower, text)

    @classmethod
    def of_text(cls, text: Any) -> dict[str, Any]:
        return {**super().of_text(text), "text_width": text.intermediate_size}

    def check(self, tower: Any) -> None:
        super().check(tower)
        if self.resampler_n_heads % self.num_key_value_heads:
            raise ConfigError(
                f"config.json: resampler_n_heads={self.resampler_n_heads} is not a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}"
            )

    def sizes(self, tower: Any) -> dict[str, Any]:
        return {
            "O": self.out,
            "W": self.text_width,
            "Q": self.resampler_n_latents,
            "J": self.resampler_depth,
            "G": self.resampler_n_heads,
            "K": self.num_key_value_heads,
            "E": self.resampler_head_dim,
            "R": 4 * self.out,
        }


PERCEIVER = Projector(
    PerceiverConfig,
    (
        *under(
            "modality_projection",
            "mlp",
            *without_bias("gate_proj", "gate", "W D -> D W"),
            *without_bias("up_proj", "up", "W D -> D W"),
            *without_bias("down_proj", "down", "O W -> W O"),
        ),
        Map("perceiver_resampler.latents", "latents", "Q O"),
        *under(
            "perceiver_resampler.layers.{J}",
            "layers.{J}",
            *rms_norm("input_latents_norm", "latents_norm", "O"),
            *rms_norm("input_context_norm", "context_norm", "O"),
            *without_bias("self_attn.q_proj", "q", "(G E) O -> O G E"),
            *without_bias("self_attn.k_proj", "k", "(K E) O -> O K E"),
            *without_bias("self_attn.v_proj", "v", "(K E) O -> O K E"),
            *without_bias("self_attn.o_proj", "o", "O (G E) -> G E O"),
            *rms_norm("post_attention_layernorm", "mlp_norm", "O"),
            *without_bias("mlp.gate_proj", "mlp.gate", "R O -> O R"),
            *without_bias("mlp.up_proj", "mlp.up", "R O -> O R"),
            *without_bias("mlp.down_proj", "mlp.down", "O R -> R O"),
        ),
        *rms_norm("perceiver_resampler.norm", "norm", "O"),
    ),
    f"{NAVIT_MODULES}:Perceiver",
)
"""An MLP, and latent vectors that attend to its output."""


@dataclass(frozen=True, kw_only=True)
class QueriesConfig(ProjectorConfig):
    """The keys of the projector of Aria: `queries` has for each number of patches the number Q of learned queries."""

    released: ClassVar[Mapping[str, int]] = {"1225": 128, "4900": 256}

    queries: tuple[tuple[int, int], ...] = ()
    vision_feature_layer: int = -1

    @classmethod
    def from_hf(cls, outer: Mapping[str, Any], tower: Any, text: Any) -> Self:
        found = outer.get("projector_patch_to_query_dict") or cls.released
        try:
            numbers = sorted((int(patches), int(queries)) for patches, queries in found.items())
        except (AttributeError, TypeError, ValueError):
            raise ConfigError(f"config.json: projector_patch_to_query_dict={short(found)} are not numbers") from None
        return super().from_hf({**outer, "queries": [tuple(pair) for pair in numbers]}, tower, text)

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return (self.vision_feature_layer,)

    def sizes(self, tower: Any) -> dict[str, Any]:
        return {"O": self.out, "W": self.out, "Q": max(number for _, number in self.queries), "A": tower.sizes["D"]}


_SQUARE = "A D -> D A"

LEARNED_QUERIES = Projector(
    QueriesConfig,
    (
        Map("query", "query", "Q D"),
        *layer_norm("cross_attn.layer_norm", "query_norm"),
        *layer_norm("cross_attn.layer_norm_kv", "key_norm"),
        *(row for x in "qkv" for row in without_bias(f"cross_attn.{x}_proj", f"before.{x}", _SQUARE)),
        *joined_heads("cross_attn.multihead_attn", "attn."),
        *with_bias("cross_attn.linear", "after", _SQUARE, "A"),
        *layer_norm("layer_norm", "norm"),
        *without_bias("feed_forward.linear_in", "up", "W D -> D W"),
        *without_bias("feed_forward.linear_out", "down", "O W -> W O"),
    ),
    f"{NAVIT_MODULES}:Queries",
)
"""Learned queries attend to the patches, and an MLP follows."""


IDEFICS3_VISION = Modality(
    VISION,
    NAVIT,
    JOINED_MATRIX,
    prefix="model.vision_model.",
    projector_prefix="model.connector.",
    placeholder_id=128257,
)
"""Idefics 3 and SmolVLM."""

IDEFICS2_VISION = replace(IDEFICS3_VISION, tower=OLDER_NAVIT, projector=PERCEIVER, placeholder_id=32001)
"""Idefics 2."""

ARIA_VISION = Modality(
    VISION,
    NAVIT,
    LEARNED_QUERIES,
    prefix="vision_tower.",
    placeholder_id=9,
    other_prefixes=("vision_tower.vision_model.",),
    tower_types=("idefics3_vision", "idefics3_vision_model", "aria_vision_model"),
)
"""Aria."""
