"""Configs of decoders that may be encoders: with `is_causal` false each token sees those behind it too."""

from dataclasses import dataclass
from typing import ClassVar

from tpuconv.models.common.config import DecoderConfig


@dataclass(frozen=True, kw_only=True)
class EitherWay(DecoderConfig):
    """A decoder that is an embedding model or a reranker if `is_causal` is false. transformers then counts
    `sliding_window` tokens on either side of a token, and a window of a causal model has the token itself too."""

    only: ClassVar = {"is_causal": (True, False)}
    left_out: ClassVar[frozenset[str]] = DecoderConfig.left_out | {"pooling"}

    is_causal: bool = True

    @property
    def sees_behind(self) -> bool:  # type: ignore[override]
        """See `DecoderConfig.sees_behind`."""
        return not self.is_causal

    @property
    def windows(self) -> tuple[int | None, ...]:
        """See `DecoderConfig.windows`."""
        windows = super().windows
        return tuple(window and window + 1 for window in windows) if self.sees_behind else windows
