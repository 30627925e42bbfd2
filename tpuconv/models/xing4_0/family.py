"""Xing 4.0: config and mapping table."""

from collections.abc import Iterator
from typing import ClassVar

from tpuconv.models.common.defaults import family_config
from tpuconv.models.deepseek_v3 import family as deepseek_v3
from tpuconv.models.deepseek_v4.family import streams
from tpuconv.models.registry import family
from tpuconv.notation.table import under


@family_config
class Config(deepseek_v3.Config):
    """The keys of config.json, whose defaults are the sizes of Xing4.0-29B-A4B. The code of the release chooses experts
    among all, whatever the numbers of groups are."""

    model_type: ClassVar[str] = "xing4_0"
    only: ClassVar = {**deepseek_v3.Config.only, "n_group": (1,), "topk_group": (1,)}

    vocab_size: int = 131072
    hidden_size: int = 3584
    intermediate_size: int = 9216
    moe_intermediate_size: int = 1024
    num_hidden_layers: int = 40
    num_attention_heads: int = 32
    num_key_value_heads: int | None = 32
    head_dim: int | None = None
    n_routed_experts: int = 64
    num_experts_per_tok: int = 4
    n_group: int = 1
    topk_group: int = 1
    first_k_dense_replace: int = 2
    routed_scaling_factor: float = 2.0
    q_lora_rank: int | None = 768
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    mhc_h_res_clamp_min: float = -30.0
    mhc_h_res_clamp_max: float = 30.0

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        low, high = self.mhc_h_res_clamp_min, self.mhc_h_res_clamp_max
        if low > high:
            yield f"mhc_h_res_clamp_min={low} is more than mhc_h_res_clamp_max={high}"

    @property
    def sizes(self) -> dict[str, int]:
        return {**super().sizes, "streams": self.hc_mult, "stream_weights": (2 + self.hc_mult) * self.hc_mult}

    @property
    def inseparable(self) -> str:
        return "its layers pass on several residual streams"


TABLE = deepseek_v3.TABLE.with_rows(
    (
        *deepseek_v3.TABLE,
        *under(
            "model.layers.{L}",
            "layers.{L}",
            *streams("attn_hc.hc", "attn_streams"),
            *streams("ffn_hc.hc", "mlp_streams"),
        ),
    )
)

FAMILY = family(Config, TABLE, "Xing4.0-29B-A4B", "Xing4_0ForCausalLM")
