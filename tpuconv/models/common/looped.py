"""Configs of models whose layers run several times; see `tpuconv.models.common.loops`, which imports jax."""

LOOPED = "some of its layers run several times"


class LoopedConfig:
    """A base before `DecoderConfig` of a config with `executed_layers`."""

    @property
    def unscannable(self) -> str:
        """See `DecoderConfig`."""
        return LOOPED

    @property
    def inseparable(self) -> str:
        """See `DecoderConfig`."""
        return LOOPED
