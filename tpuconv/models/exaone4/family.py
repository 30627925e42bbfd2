"""EXAONE 4: config and mapping table."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from tpuconv.mapping.table import under
from tpuconv.models.common.rope import PLAIN_ROPE, Rope
from tpuconv.models.common.rows import ATTENTION, HEAD_NORMS, MLP, POST_NORMS, decoder_table
from tpuconv.models.common.windows import PatternConfig
from tpuconv.models.registry import family


@dataclass(frozen=True)
class Config(PatternConfig):
    """The keys of config.json. Without `layer_types` every `sliding_window_pattern`-th layer sees all tokens. Without a
    window all layers do and have rotary positions; with one, only layers with the window have them."""

    model_type: ClassVar[str] = "exaone4"
    least: ClassVar[Mapping[str, int]] = {"sliding_window_pattern": 0}

    vocab_size: int = 102400
    hidden_size: int = 4096
    intermediate_size: int = 16384
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = 32
    head_dim: int | None = None
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    rope: Rope = PLAIN_ROPE
    sliding_window: int | None = 4096
    sliding_window_pattern: int | str | None = 4
    layer_types: tuple[str, ...] | None = None

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
