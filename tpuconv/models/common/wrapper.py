"""Text models inside multimodal ones ("wrappers"). The text model alone is converted: its config is `text_config`, and
its tensors have a prefix. What sees images or hears is skipped by name.

The prefix depends on the release of transformers that wrote the files. Until 4.51 a wrapper held a complete causal
model (`language_model.model.`, `language_model.lm_head.`), or had its parts at the root (`model.`); since 4.52 the text
model is `model.language_model.`, and the head at the root. The table has the names of releases; the others lead to them
(`tpuconv.notation.spelling`).
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Self

from tpuconv.models.common.beside import AUDIO, Modality
from tpuconv.models.common.config_keys import NO_EFFECT, VALUES_OF_ALL, ignored_keys
from tpuconv.models.common.heads import is_of_head
from tpuconv.models.common.key_types import object_of
from tpuconv.models.tokenizer import added_token
from tpuconv.notation.table import MTP_PARAMETERS, MappingTable
from tpuconv.sources.config import ENCODING_KEYS, encoding_of

PREFIXES: Mapping[str, str] = {
    "language_model.model.": "language_model.lm_head.",
    "model.language_model.": "lm_head.",
    "model.": "lm_head.",
}
"""The prefix of the head for each prefix of the text model."""

OUTSIDE_KEYS = frozenset(
    {
        *("mm_tokens_per_image", "spatial_merge_size", "multimodal_projector_bias", "understand_projector_stride"),
        *("out_hidden_size", "position_id_per_seconds", "seconds_per_chunk", "merged_hidden_size", "processor_config"),
    }
)
OUTSIDE_BEGINNINGS = ("vision_", "audio_", "video_", "image_", "projector_", "projection_")
OUTSIDE_ENDS = ("_token_id", "_token_index")
"""Keys beside `text_config` that have no effect on the text model, and how the names of others begin or end."""
KEYS_AROUND = ("architectures", "model_type", "quantization_config", "tie_word_embeddings", "dtype", "torch_dtype")
"""The keys of config.json that are not of the text model alone."""

SEES = "vision encoder: the text model alone is converted"
HEARS = "audio encoder: the text model alone is converted"
BRINGS = "multimodal projector: the text model alone is converted"

LLAVA = {"vision_tower": SEES, "multi_modal_projector": BRINGS}
"""The modules beside the text model in LLaVA and many models like it."""


def outside_of(modalities: Sequence[Modality]) -> dict[str, str]:
    """Returns the modules that the encoders and projectors of a multimodal model are, and why they are skipped."""
    encoders = {each.modules[0]: HEARS if each.part == AUDIO else SEES for each in modalities}
    return encoders | {name: BRINGS for each in modalities for name in each.modules[1:]}


def is_outside(reason: str) -> bool:
    """Whether tensors that are skipped for this reason are of a part of a multimodal model beside its text model. Every
    such reason says so in these words."""
    return "alone is converted" in reason


def text_apart(raw: Mapping[str, Any], text_type: str, beside: Collection[str] = ()) -> Mapping[str, Any]:
    """Returns a parsed config.json with the keys of its text model in `text_config`, which has this `model_type`. The
    keys `beside` stay at the root, and keys of images and videos. A config.json that has a `text_config` is returned as
    it is."""
    if "text_config" in raw:
        return raw
    stay = {k for k in raw if k in KEYS_AROUND or k in beside or k.startswith(("image_", "video_", "vision_"))}
    text = {key: value for key, value in raw.items() if key not in stay}
    return {**{key: raw[key] for key in raw if key in stay}, "text_config": {**text, "model_type": text_type}}


def inside(
    text: MappingTable,
    prefix: str,
    outside: Mapping[str, str],
    *,
    tensors: Mapping[str, str] = {},
    head: str | None = None,
) -> MappingTable:
    """Returns the table of a text model inside a wrapper, with the names of releases.

    Args:
        text: the table of the text model, with the prefix `model.`.
        prefix: that of the text model in releases.
        outside: names of the modules outside the text model, and why they are skipped. They may stand below `model.`.
        tensors: the same of single tensors.
        head: the prefix of the head in releases; by default that of `PREFIXES`.
    """
    patterns = {f"{name}.*": why for name, why in outside.items()} | dict(tensors)
    skipped = {f"{front}{pattern}": why for pattern, why in patterns.items() for front in ("", "model.")}
    return text.renamed(partial(_inside, prefix=prefix, head=head or PREFIXES[prefix]), ignore=skipped)


def _inside(name: str, prefix: str, head: str) -> str:
    if name.startswith(MTP_PARAMETERS):
        return name
    if name.startswith("lm_head."):
        return head + name.removeprefix("lm_head.")
    if not name.startswith("model."):  # a head with another name
        return head.removesuffix("lm_head.") + name
    return prefix + name.removeprefix("model.")


class WrapperConfig:
    """Reads the config of a wrapper. A family's Config derives from this class and from the Config of the text model,
    in this order.

    Attributes:
        flat: whether the keys of `text_config` may stand at the root instead.
        tied: `tie_word_embeddings` where no key says it. It stands at the root in newer files, in `text_config` in
            older ones.
        wrapper_type: the model type of the wrapper, if `model_type` is that of the text model.
        outside_keys: keys beside `text_config` without effect on the text model, besides those of all wrappers.
    """

    model_type: ClassVar[str]
    wrapper_type: ClassVar[str] = ""
    outside_keys: ClassVar[frozenset[str]] = frozenset()
    flat: ClassVar[bool] = False
    tied: ClassVar[bool] = False

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        text = cls.text_of(raw)
        cls._beside(raw)
        out: Self = super().from_hf(text)  # type: ignore[misc]
        return out

    @classmethod
    def ignored_keys(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        inside: dict[str, Any] = super().ignored_keys(cls.text_of(raw))  # type: ignore[misc]
        return {**inside, **cls._beside(raw)}

    @classmethod
    def settled(cls, raw: Mapping[str, Any], tensors: Collection[str]) -> Mapping[str, Any]:
        """Returns a parsed config.json that says whether the head is tied: if it does not, a head among the tensors
        tells."""
        if cls._is_tied(cls._around(raw)) is not None:
            return raw
        return {**raw, "tie_word_embeddings": not any(map(is_of_head, tensors))}

    def with_files(self, read: Callable[[str], bytes | None]) -> Self:
        """Returns this config with the ids of placeholders that only the tokenizer's files say. Where these do not
        either, `see` refuses features."""
        config: Any = super().with_files(read)  # type: ignore[misc]
        if not any(each.unknown_tokens for each in config.towers):
            return config  # type: ignore[no-any-return]
        towers = []
        for each in config.towers:
            found = {name: added_token(token, read) for name, token in each.unknown_tokens.items()}
            towers.append(replace(each, **{name: id for name, id in found.items() if id is not None}))
        return replace(config, towers=tuple(towers))  # type: ignore[no-any-return]

    @classmethod
    def text_of(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the config of the text model that a parsed config.json has.

        Raises:
            ConfigError: `text_config` is not an object.
        """
        raw = cls._around(raw)
        text = object_of(raw, "text_config")
        if cls._is_flat(raw):
            known: list[str] = cls.known_keys()  # type: ignore[attr-defined]
            text = {key: value for key, value in raw.items() if key in known or not _has_no_effect(key)}
        tied = cls._is_tied(raw)
        encoding = {} if (found := encoding_of(raw)) is None else {ENCODING_KEYS[0]: found}
        return {**text, **encoding, "tie_word_embeddings": cls.tied if tied is None else tied}

    @classmethod
    def _around(cls, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        return cls.around_text(raw)  # type: ignore[attr-defined, no-any-return]  # of `DecoderConfig`

    @classmethod
    def _is_tied(cls, raw: Mapping[str, Any]) -> Any:
        """What the keys say about tying; None if nothing."""
        text = raw.get("text_config")
        inside = text.get("tie_word_embeddings") if isinstance(text, Mapping) else None
        return inside if raw.get("tie_word_embeddings") is None else raw["tie_word_embeddings"]

    @classmethod
    def _is_flat(cls, raw: Mapping[str, Any]) -> bool:
        return cls.flat and raw.get("text_config") is None

    @classmethod
    def _beside(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the keys beside `text_config` that neither this family nor the reference reads."""
        raw = cls._around(raw)
        if cls._is_flat(raw):
            return {}
        known = {"text_config", "tie_word_embeddings", *cls.outside_keys}
        beside = {key: value for key, value in raw.items() if not _has_no_effect(key) and key not in known}
        return ignored_keys(beside, (), VALUES_OF_ALL, cls.wrapper_type or cls.model_type)


def _has_no_effect(key: str) -> bool:
    named = key in NO_EFFECT or key in OUTSIDE_KEYS
    return named or key.startswith(OUTSIDE_BEGINNINGS) or key.endswith(OUTSIDE_ENDS)
