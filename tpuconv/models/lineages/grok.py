"""Grok 2."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any, ClassVar

from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.rows import EXPERT_FORMS, MLP, NUMBERED_EXPERT_MLPS, when
from tpuconv.models.common.sparse import ChosenExperts
from tpuconv.models.declare import decoder
from tpuconv.models.parts import Attn, Experts, Factors, Norms
from tpuconv.notation.letters import Word, declare
from tpuconv.notation.release import IN_PIECES, RANK_MARK
from tpuconv.notation.table import Map, under

declare(
    ranks=Word("tensor-parallel ranks, each with files of its own"),
    rank_width=Word("MLP width of an expert in the file of one rank", as_="M"),
)

PIECES_OF_EXPERTS = tuple(
    Map(f"experts.{{E}}.{name}.weight{RANK_MARK}{{ranks}}", param, layout)
    for name, param, layout in (
        ("w1", "gate.kernel", "rank_width D -> E D (ranks rank_width)"),
        ("w3", "up.kernel", "rank_width D -> E D (ranks rank_width)"),
        ("w2", "down.kernel", "D rank_width -> E (ranks rank_width) D"),
    )
)
"""Experts whose width is divided among the files of ranks (`tpuconv.sources.ranks`)."""


@family_config
class GrokConfig(ChosenExperts, DecoderConfig):
    """A limit of 0 is none.

    Attributes:
        expert_ranks: the number of pieces of each matrix of an expert, which the names of tensors tell.
    """

    experts_key: ClassVar[str] = "num_local_experts"
    settled_keys: ClassVar[frozenset[str]] = frozenset({"expert_ranks"})
    left_out: ClassVar[frozenset[str]] = frozenset(
        {
            # of rotary positions without a scaling, as `rope_type` says
            *("original_max_position_embeddings", "scaling_factor", "extrapolation_factor", "attn_factor"),
            *("beta_fast", "beta_slow"),
            # of the servers that load files of ranks
            *("load_presharded_attn", "load_presharded_embedding", "load_presharded_mlp", "load_presharded_moe"),
            *("context_len", "merge_gate_up", "replicate_embedding", "replicate_lm_head"),
        }
    )
    only: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "rope_type": ("original", None),
        "attn_logit_softcapping_method": ("tanh",),
        "rope_rotate_half_dims": (False,),
        "sliding_window_size": (-1, None),
        "global_attn_every_n": (1,),
    }
    least: ClassVar[Mapping[str, int]] = {"attn_temperature_len": -1}

    num_local_experts: int = 8
    num_experts_per_tok: int = 2
    moe_intermediate_size: int | None = None
    residual_moe: bool = False
    attn_temperature_len: int = -1
    attn_logit_softcapping: float = 30.0
    router_logit_softcapping: float = 30.0
    final_logit_softcapping: float | None = None
    embedding_multiplier_scale: float = 1.0
    output_multiplier_scale: float = 1.0
    expert_ranks: int = 1

    @classmethod
    def settled(cls, raw: Mapping[str, Any], tensors: Collection[str]) -> Mapping[str, Any]:
        """Returns a parsed config.json that says in how many pieces the matrices of experts are."""
        ranks = {rank for _, found, rank in (name.rpartition(RANK_MARK) for name in tensors) if found}
        return {**raw, "expert_ranks": len(ranks)} if ranks else raw

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        for name in ("attn_logit_softcapping", "router_logit_softcapping"):
            if getattr(self, name) < 0:
                yield f"{name}={getattr(self, name)} is negative"
        if self.sizes["M"] % self.expert_ranks:
            yield f"the width {self.sizes['M']} of an expert is not divisible by {self.expert_ranks} ranks"

    @property
    def sizes(self) -> dict[str, int]:
        sizes = super().sizes
        return {**sizes, "ranks": self.expert_ranks, "rank_width": sizes["M"] // self.expert_ranks}

    @property
    def score_cap(self) -> float | None:
        """The soft limit of scores of attention; None without one."""
        return self.attn_logit_softcapping or None

    @property
    def router_cap(self) -> float | None:
        """The soft limit of the scores of experts; None without one."""
        return self.router_logit_softcapping or None

    @property
    def logit_cap(self) -> float | None:
        """The soft limit of logits; None without one."""
        return self.final_logit_softcapping or None


GROK = decoder(
    "grok",
    "Grok 2",
    "Grok1ForCausalLM",
    "Grok1ModelForCausalLM",
    Norms("sandwich", names=("pre_attn_norm", "post_attn_norm", "pre_moe_norm", "post_moe_norm")),
    Attn(module="modules.grok:SharpenedAttention"),
    Experts(
        below="",
        module="modules.grok:CappedExperts",
        rows=(
            *under("block_sparse_moe", "moe", Map("gate.weight", "router.kernel", "E D -> D E"), *NUMBERED_EXPERT_MLPS),
            *when("residual_moe", *under("mlp", "moe.dense", *MLP)),
        ),
    ),
    Factors(embedding="embedding_multiplier_scale", logits="output_multiplier_scale", cap="logit_cap"),
    config=GrokConfig,
    forms=({**EXPERT_FORMS, IN_PIECES: PIECES_OF_EXPERTS},),
    # As xai-org/grok-2 has them.
    defaults={
        **{"vocab_size": 131072, "hidden_size": 8192, "intermediate_size": 32768, "num_hidden_layers": 64},
        **{"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072},
        **{"rms_norm_eps": 1e-5, "tie_word_embeddings": False},
    },
)
