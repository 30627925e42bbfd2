"""Configs of models whose queries, keys and values are clipped."""

from collections.abc import Iterator


class ClippedConfig:
    """A decoder whose queries, keys and values are limited to between -`clip_qkv` and `clip_qkv`, if that is a number.
    A family's Config derives from this class and from another, in this order."""

    clip_qkv: float | None = None

    def contradictions(self) -> Iterator[str]:
        """See `DecoderConfig.contradictions`."""
        yield from super().contradictions()  # type: ignore[misc]
        if self.clip_qkv is not None and self.clip_qkv <= 0:
            yield f"clip_qkv={self.clip_qkv} is not positive"
