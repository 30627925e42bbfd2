"""EXAONE 4: config and mapping table."""

from collections.abc import Iterator, Mapping
from typing import ClassVar

from tpuconv.mapping.table import under
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.rope import Rope
from tpuconv.models.common.rows import ATTENTION, HEAD_NORMS, MLP, POST_NORMS, decoder_table
from tpuconv.models.common.windows import PatternConfig
from tpuconv.models.registry import family


@family_config
class Config(PatternConfig):
    """The keys of config.json. Without `layer_types` every `sliding_window_pattern`-th layer sees all tokens. Without a
    window all layers do and have rotary positions; with one, only layers with the window have them."""

    model_type: ClassVar[str] = "exaone4"
    least: ClassVar[Mapping[str, int]] = {"sliding_window_pattern": 0}

    head_dim: int | None = None
    sliding_window_pattern: int | str | None

    def contradictions(self) -> Iterator[str]:
        pattern = self.sliding_window_pattern
        if self.layer_types is None and self.sliding_window and (not isinstance(pattern, int) or pattern == 0):
            yield f"sliding_window_pattern={pattern!r} needs layer_types"
        else:
            yield from super().contradictions()

    @property
    def kinds(self) -> tuple[str, ...]:
        if self.layer_types is None and self.sliding_window is None:
            return ("full_attention",) * self.num_hidden_layers
        return super().kinds

    @property
    def full_every(self) -> int:  # type: ignore[override]
        """The last of as many layers sees all tokens."""
        return int(self.sliding_window_pattern or 0)

    @property
    def ropes(self) -> tuple[Rope | None, ...]:
        has_windows = self.sliding_window is not None
        return tuple(None if has_windows and kind == "full_attention" else self.rope for kind in self.kinds)


TABLE = decoder_table(*ATTENTION, *HEAD_NORMS, *POST_NORMS, *under("mlp", "mlp", *MLP))

FAMILY = family(Config, TABLE, "EXAONE 4.0", "Exaone4ForCausalLM")
