"""Segments of names that classes of transformers and trainers add, and buffers that no model reads."""

import re
from collections.abc import Callable, Collection, Sequence

FRONTS = frozenset({"model", "language_model", "text_model", "transformer", "thinker"})
"""Leading segments that classes of transformers add or leave out."""
_OF_TORCH = "_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module"
_WRAPPERS = f"{_OF_TORCH}|module|base_layer"
INSERTED = re.compile(rf"(?<![^.])(?:{_WRAPPERS})(?:\.|$)")
"""Segments that trainers insert into names."""
TRAINERS = re.compile(r"^(?:base_model\.model|pretrained_model|module|_orig_mod|_forward_module)\.")
"""Segments that trainers put before names."""
KEY_MAPPING = {
    rf"^(?:(?:base_model\.model|pretrained_model|_forward_module|{_WRAPPERS})\.)+": "",
    rf"(?<=\.)(?:(?:{_WRAPPERS})\.)+": "",
}
"""The same segments for transformers' `key_mapping`, which takes each pattern out of a name once."""
BESIDE_MODELS = (
    (
        re.compile(
            r"(.+\.)?(rotary_emb\.(inv_freq|original_inv_freq|cos_cached|sin_cached)|rotary_pos_emb\.inv_freq|"
            r"embeddings\.position_ids)"
        ),
        "computed from config.json",
    ),
    (
        re.compile(r"v_head\.(summary\.)?(weight|bias)"),
        "the value head of a training by PPO, which no logits depend on",
    ),
)
"""Tensors that no model reads, and why they are skipped: buffers that some versions of transformers, and some trainers,
saved; and what TRL saves beside a model."""


def without_front(name: str, fronts: Collection[str] = FRONTS) -> str:
    """Returns a name without its leading segments that are in `fronts`."""
    while (front := name.partition("."))[0] in fronts and front[2]:
        name = front[2]
    return name


def undressed(name: str) -> str:
    """Returns a name without the segments of trainers."""
    return INSERTED.sub("", TRAINERS.sub("", TRAINERS.sub("", name))).rstrip(".")


def as_peft_names(name: str) -> str:
    """Returns a name without the segments of trainers, but with those that PEFT nests modules by."""
    while found := TRAINERS.match(name):
        name = name[found.end() :]
    return re.sub(rf"(?<![^.])(?:{_OF_TORCH})\.", "", name)


def all_undressed(names: Collection[str]) -> Collection[str]:
    """Returns names without the segments that a trainer put before all of them."""
    first = next(iter(names), "")
    return names if undressed(first) == first else dict.fromkeys(map(undressed, names))


def reason_by(patterns: Sequence[tuple[re.Pattern[str], str]]) -> Callable[[str], str | None]:
    """Returns a function that returns why a tensor is not converted: the reason beside the first of the patterns that
    its name matches, with the segments before it or without; None if there is none."""

    def why(name: str) -> str | None:
        names = (name, without_front(undressed(name)))
        found = (reason for pattern, reason in (*patterns, *BESIDE_MODELS) if any(map(pattern.fullmatch, names)))
        return next(found, None)

    return why
