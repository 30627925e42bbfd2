"""EXAONE."""

from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from typing import ClassVar

from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.rope import Rope
from tpuconv.models.common.rows import (
    ATTENTION,
    CORRECTION_BESIDE,
    EXPERT_MLPS,
    FURTHER_TOKENS,
    HEAD_NORMS,
    MLP,
    MTP_AROUND,
    PRE_NORMS,
    SHARED_EXPERT_ROWS,
)
from tpuconv.models.common.sparse import SparseConfig
from tpuconv.models.common.windows import PatternConfig
from tpuconv.models.declare import decoder
from tpuconv.models.lineages.llama import LLAMA, NO_BIAS
from tpuconv.models.parts import Attn, Experts, Mlp, Norms
from tpuconv.notation.table import under

EXAONE_NAMES = (
    ("model.embed_tokens.", "transformer.wte."),
    ("model.layers.", "transformer.h."),
    ("model.norm.", "transformer.ln_f."),
    ("input_layernorm.", "ln_1."),
    ("post_attention_layernorm.", "ln_2."),
    ("self_attn.o_proj.", "self_attn.out_proj."),
    ("self_attn.", "attn.attention."),
    ("mlp.gate_proj.", "mlp.c_fc_0."),
    ("mlp.up_proj.", "mlp.c_fc_1."),
    ("mlp.down_proj.", "mlp.c_proj."),
)
"""Parts of names in Llama, and what EXAONE has in their places."""

EXAONE = LLAMA.but(
    "exaone",
    "EXAONE 3, 3.5, Deep",
    "ExaoneForCausalLM",
    only={"activation_function": ("silu",), **NO_BIAS},
    aliases={"num_layers": "num_hidden_layers", "layer_norm_epsilon": "rms_norm_eps"},
    table=LLAMA.table.renamed(lambda name: reduce(lambda text, pair: text.replace(*pair), EXAONE_NAMES, name)),
)


@family_config
class Exaone4Config(PatternConfig):
    """Without `layer_types` every `sliding_window_pattern`-th layer sees all tokens. Without a window all layers do and
    have rotary positions; with one, only layers with the window have them."""

    least: ClassVar[Mapping[str, int]] = {"sliding_window_pattern": 0}

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


EXAONE4 = decoder(
    "exaone4",
    "EXAONE 4.0",
    "Exaone4ForCausalLM",
    Attn(norms="each head"),
    Norms("post"),
    Mlp(),
    config=Exaone4Config,
)


class WithOneFurther(SparseConfig):
    """With one layer for multi-token prediction."""

    @property
    def sizes(self) -> dict[str, int]:
        return {**super().sizes, "A": self.hidden_size}

    @property
    def layer_sets(self) -> dict[str, Sequence[int]]:
        return {**super().layer_sets, "U": (0,)}


MTP_LAYER = (*PRE_NORMS, *ATTENTION, *HEAD_NORMS)

EXAONE_MOE = decoder(
    "exaone_moe",
    "K-EXAONE",
    "ExaoneMoeForCausalLM",
    "ExaoneMoEForCausalLM",
    Norms(),
    Attn(norms="each head"),
    Experts(
        "some or all",
        module="deepseek_v3.modules:MoE",
        rows=(*CORRECTION_BESIDE, *EXPERT_MLPS, *SHARED_EXPERT_ROWS),
    ),
    base="modules.exaone:DraftingDecoder",
    config=(WithOneFurther, Exaone4Config),
    least={"first_k_dense_replace": 0, "sliding_window_pattern": 0},
    hf_names={"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"},
    others=(
        *under("mtp", "mtp", *MTP_AROUND),
        *under("mtp.layers.{U}", "mtp.{U}", *MTP_LAYER, *under("mlp", "mlp", *MLP)),
    ),
    ignore={"mtp.*": FURTHER_TOKENS},
)
