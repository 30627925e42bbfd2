"""Step-1 and Step-3."""

from collections.abc import Mapping
from typing import Any, ClassVar

from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.rope import Rope
from tpuconv.models.common.rows import ATTENTION
from tpuconv.models.common.sparse import ChosenExperts, MixedMLPs
from tpuconv.models.declare import decoder
from tpuconv.models.lineages.llama import NO_BIAS
from tpuconv.models.parts import Attn, Experts, Mlp, Norms
from tpuconv.models.step3p5.family import ROUTER_ROW, STACKED_MLPS, layer_numbers
from tpuconv.notation.table import Map


class UnturnedConfig(DecoderConfig):
    """No layer has rotary positions."""

    @property
    def ropes(self) -> tuple[Rope | None, ...]:
        return (None,) * self.num_hidden_layers


STEP1 = decoder(
    "step1",
    "Step-1 of Step-Audio, StepLaw",
    "Step1ForCausalLM",
    Norms(),
    Attn(module="modules.step:RootAlibiAttention"),
    Mlp(),
    config=UnturnedConfig,
    only=NO_BIAS,
    derived=DecoderConfig.derived | {"head_dim"},
    synonyms={"num_attention_groups": "num_key_value_heads", "max_seq_len": "max_position_embeddings"},
    # As `configuration_step1.py` of stepfun-ai/Step-Audio-TTS-3B has them.
    defaults={
        **{"vocab_size": 65536, "hidden_size": 5120, "intermediate_size": 13312, "num_hidden_layers": 48},
        **{"num_attention_heads": 40, "num_key_value_heads": 8, "max_position_embeddings": 4096},
        **{"rms_norm_eps": 1e-5, "tie_word_embeddings": True},
    },
)


@family_config
class Step3Config(ChosenExperts, MixedMLPs, DecoderConfig):
    """The keys of config.json, by the names of other families or of the release. The defaults come from vLLM.

    Attributes:
        share_q_dim: the width of the latent vector that queries are made of.
        moe_layers_enum: the layers with experts, which may be numbers that the model does not reach; None for all but
            the first.
    """

    only: ClassVar = {"num_key_value_heads": (1,), **NO_BIAS}
    synonyms: ClassVar[Mapping[str, str]] = {
        "num_attention_groups": "num_key_value_heads",
        "max_position_embedding": "max_position_embeddings",
        "moe_num_experts": "num_experts",
        "moe_top_k": "num_experts_per_tok",
        "norm_expert_weight": "norm_topk_prob",
        "share_expert_dim": "shared_expert_intermediate_size",
    }
    left_out: ClassVar[frozenset[str]] = frozenset({"max_seq_len"})  # without effect
    default_rope: ClassVar[Mapping[str, Any]] = {"rope_theta": 500_000.0}
    has_shared_experts: ClassVar[bool] = True

    share_q_dim: int = 2048
    moe_layers_enum: tuple[int, ...] | None = tuple(range(4, 60))

    @classmethod
    def in_our_keys(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        out = super().in_our_keys(raw)
        if out.get("moe_layers_enum") is not None:
            out["moe_layers_enum"] = sorted(layer_numbers(out["moe_layers_enum"]))
        return out

    @property
    def mlp_kinds(self) -> tuple[str, ...]:
        layers = range(self.num_hidden_layers)
        sparse = set(layers[1:] if self.moe_layers_enum is None else self.moe_layers_enum)
        return tuple("sparse" if layer in sparse else "dense" for layer in layers)

    @property
    def sizes(self) -> dict[str, int]:
        return {**super().sizes, "Q": self.share_q_dim}


STEP3_TEXT = decoder(
    "step3_text",
    "Step-3, the text model saved on its own",
    "Step3TextForCausalLM",
    Norms(),
    Attn(
        module="modules.step:FactorizedAttention",
        rows=(
            Map("self_attn.q_proj.weight", "attn.q_a.kernel", "Q D -> D Q"),
            Map("self_attn.inter_norm.weight", "attn.q_a_norm.scale", "Q"),
            Map("self_attn.wq.weight", "attn.q.kernel", "(N H) Q -> Q N H"),
            *ATTENTION[1:],
        ),
    ),
    Experts(
        "some",
        below="",
        module="common.moe:RoutedExperts",
        router="modules.step:ProbableRouter",
        rows=(ROUTER_ROW, *STACKED_MLPS),
        keys=(
            *("moe_intermediate_size", "shared_expert_intermediate_size", "num_experts", "num_experts_per_tok"),
            "norm_topk_prob",
        ),
    ),
    config=Step3Config,
    defaults={
        **{"vocab_size": 128815, "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61},
        **{"num_attention_heads": 64, "num_key_value_heads": 1, "head_dim": 256, "max_position_embeddings": 65536},
        **{"moe_intermediate_size": 5120, "shared_expert_intermediate_size": 5120, "num_experts": 48},
        **{"num_experts_per_tok": 3, "norm_topk_prob": False, "rms_norm_eps": 1e-5, "tie_word_embeddings": False},
    },
)
