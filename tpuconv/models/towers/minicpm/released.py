"""The tower of MiniCPM-V 2.6, 4 and 4.5 and of MiniCPM-o, its resampler, and their config.json, whose code is in the
releases: configs and tables."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from tpuconv.errors import ConfigError, UnsupportedConfig
from tpuconv.jsonfile import short
from tpuconv.models.common.beside import VISION, Modality, Projector, ProjectorConfig, Tower
from tpuconv.models.common.encoder_keys import TEXT_ALONE
from tpuconv.models.common.wrapper import text_apart
from tpuconv.models.towers.navit.family import NAVIT
from tpuconv.models.towers.rows import joined_heads, layer_norm, without_bias
from tpuconv.models.towers.siglip.family import ImageConfig
from tpuconv.notation.table import Map

SLICED_MODULES = "tpuconv.models.towers.minicpm.sliced"
TEXTS_BY_VERSION = {"2.6": "qwen2", "4": "llama", "4.0": "llama", "4.5": "qwen3"}
"""The type of the text model, by `version` of config.json."""
KEYS_OF_SLICES = (
    *("batch_vision_input", "drop_vision_last_layer", "image_size", "patch_size", "query_num", "slice_config"),
    *("slice_mode", "use_image_id", "version"),
)
"""The keys of config.json that are not of the text model."""
KEYS_OF_SPEECH = (
    *("audio_chunk_length", "audio_config", "audio_pool_step", "init_audio", "init_tts", "init_vision"),
    *("chunk_input", "listen_speak_type", "stream_input", "tts_config"),
)
"""The same of MiniCPM-o."""
POOL_STEPS = {"4.5": 5}
"""The default of `audio_pool_step` by version; of other versions it is 2."""
HEAD_WIDTH = 128
"""The resampler has a head for each so many values of its width."""


@dataclass(frozen=True, kw_only=True)
class SlicedVitConfig(ImageConfig):
    """The keys of `vision_config`."""

    vision_use_head: ClassVar[bool] = False


@dataclass(frozen=True, kw_only=True)
class SliceQueriesConfig(ProjectorConfig):
    """The keys of the resampler, with the defaults of the release. Q counts the learned queries, which attend with G
    heads of width E; A is the width of the text too."""

    query_num: int = 64
    drop_vision_last_layer: bool = True

    def check(self, tower: Any) -> None:
        super().check(tower)
        if self.drop_vision_last_layer:
            raise UnsupportedConfig(
                f"config.json: drop_vision_last_layer={self.drop_vision_last_layer} is not implemented", hint=TEXT_ALONE
            )
        if tower.hidden_size == self.out:
            raise UnsupportedConfig(
                f"a resampler of images as wide as the text model ({self.out}) is not implemented", hint=TEXT_ALONE
            )
        heads = self.out // HEAD_WIDTH
        if not heads or self.out % heads or self.out % 4:
            raise ConfigError(f"config.json: hidden_size={self.out} is no width of a resampler with {heads} heads")

    def sizes(self, tower: Any) -> dict[str, Any]:
        heads = self.out // HEAD_WIDTH
        return {"O": self.out, "A": self.out, "Q": self.query_num, "G": heads, "E": self.out // heads}


SLICED_VIT = Tower("sliced_vit", "MiniCPM-V 2.6 to 4.5", SlicedVitConfig, NAVIT.rows, f"{SLICED_MODULES}:SlicedVit")

SLICE_QUERIES = Projector(
    SliceQueriesConfig,
    (
        Map("query", "query", "Q A"),
        *without_bias("kv_proj", "before", "A D -> D A"),
        *layer_norm("ln_q", "query_norm", "A"),
        *layer_norm("ln_kv", "key_norm", "A"),
        *joined_heads("attn", "", "G E", "A"),
        *layer_norm("ln_post", "norm", "A"),
        Map("proj", "matrix.kernel", "A O"),
    ),
    f"{SLICED_MODULES}:SliceQueries",
)
"""Learned queries attend to the patches of a slice, whose rows and columns are added to the keys as sines."""

SLICED_VISION = Modality(
    VISION,
    SLICED_VIT,
    SLICE_QUERIES,
    prefix="vpm.",
    projector_prefix="resampler.",
    placeholder_token="<unk>",
)


def in_keys_of_minicpm_v(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a parsed config.json of MiniCPM-V with the keys of its text model, which stand at its root, in
    `text_config`, if it has none.

    Raises:
        UnsupportedConfig: a version of another text model.
    """
    return _with_text_apart(raw, KEYS_OF_SLICES)


def in_keys_of_minicpm_o(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the same of MiniCPM-o, which is 4.5 if no key says the version.

    Raises:
        UnsupportedConfig: a version of another text model.
    """
    version = str(raw.get("version") or "4.5")
    known = {"audio_pool_step": POOL_STEPS.get(version, 2), **raw, "version": version}
    return _with_text_apart(known, (*KEYS_OF_SLICES, *KEYS_OF_SPEECH))


def _with_text_apart(raw: Mapping[str, Any], beside: tuple[str, ...]) -> Mapping[str, Any]:
    if "text_config" in raw:
        return raw
    version = raw.get("version")
    text_type = TEXTS_BY_VERSION.get(str(version))
    if text_type is None:
        raise UnsupportedConfig(
            f"config.json: version={short(version)} of MiniCPM is not implemented",
            hint=f"known are the versions {', '.join(TEXTS_BY_VERSION)}; others are for other text models or encoders",
        )
    return text_apart(raw, text_type, beside)
