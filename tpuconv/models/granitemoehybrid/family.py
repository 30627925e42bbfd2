"""Granite 4: config and mapping table."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from tpuconv.mapping.table import under
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.hybrid import NO_LIMIT, MambaConfig
from tpuconv.models.common.rope import Rope
from tpuconv.models.common.rows import ATTENTION, MAMBA_ROWS, O_BIAS, PRE_NORMS, QKV_BIAS, decoder_table, when
from tpuconv.models.granite import family as granite
from tpuconv.models.granitemoe.family import FUSED_EXPERTS, FUSED_SHARED
from tpuconv.models.registry import family


@family_config
class Config(granite.Config, MambaConfig):
    """The keys of config.json. `intermediate_size` is the width of one expert, `shared_intermediate_size` the width of
    the MLP which all tokens pass. There may be no experts, and no layers with Mamba-2."""

    model_type: ClassVar[str] = "granitemoehybrid"
    only: ClassVar = {"mlp_bias": (False,)}
    least: ClassVar[Mapping[str, int]] = {"num_local_experts": 0, "num_experts_per_tok": 0}

    num_local_experts: int
    num_experts_per_tok: int
    shared_intermediate_size: int
    position_embedding_type: str | None
    mamba_d_head: int | None = None
    time_step_limit: tuple[float, ...] = (0.0, NO_LIMIT)

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        chosen, experts = self.num_experts_per_tok, self.num_local_experts
        if experts and not 0 < chosen <= experts:
            yield f"num_experts_per_tok={chosen} is not between 1 and num_local_experts={experts}"

    @property
    def kinds(self) -> tuple[str, ...]:
        return self.layer_types or (self.state_kind,) * self.num_hidden_layers

    @property
    def ropes(self) -> tuple[Rope | None, ...]:
        return super().ropes if self.position_embedding_type == "rope" else (None,) * self.num_hidden_layers

    @property
    def axes(self) -> dict[str, Any]:
        return {
            **super().axes,
            "J": tuple(range(self.num_hidden_layers)) if self.has_experts else (),
            "E": self.num_local_experts,
            "M": self.intermediate_size,
            "W": self.shared_intermediate_size,
        }

    @property
    def has_experts(self) -> bool:
        """True if layers have experts, besides the MLP that all tokens pass."""
        return self.num_local_experts > 0

    @property
    def has_shared_expert(self) -> bool:
        """True if all tokens pass an MLP beside experts."""
        return self.has_experts

    @property
    def is_dense(self) -> bool:
        """True if there are no experts."""
        return not self.has_experts


TABLE = decoder_table(
    *PRE_NORMS,
    *under("block_sparse_moe", "moe", *when("has_experts", *FUSED_EXPERTS)),
    *under("shared_mlp", "moe.shared", *when("has_experts", *FUSED_SHARED)),
    *under("shared_mlp", "mlp", *when("is_dense", *FUSED_SHARED)),
    others=(
        *under("model.layers.{f}", "layers.{f}", *ATTENTION, *when("attention_bias", *QKV_BIAS, O_BIAS)),
        *under("model.layers.{l}.mamba", "layers.{l}.attn", *MAMBA_ROWS),
    ),
)

FAMILY = family(Config, TABLE, "Granite 4", "GraniteMoeHybridForCausalLM")
