"""gpt-oss: config and mapping table."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Self

from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.kinds import faults_of_kinds
from tpuconv.models.common.rows import ATTENTION, ATTN_NORM, O_BIAS, QKV_BIAS, decoder_table, when
from tpuconv.models.common.sparse import ChosenExperts
from tpuconv.models.common.windows import WINDOW_KINDS, windows_by_kind
from tpuconv.models.registry import family
from tpuconv.notation.table import Map


@family_config
class Config(ChosenExperts, DecoderConfig):
    """The keys of config.json, and whether the experts are stored in MXFP4, in which their axes have another order.
    `intermediate_size` is the width of one expert. `experts_per_token` and `initial_context_length` repeat the values
    of other keys."""

    model_type: ClassVar[str] = "gpt_oss"
    experts_key: ClassVar[str] = "num_local_experts"
    derived: ClassVar[frozenset[str]] = DecoderConfig.derived | {"is_mxfp4"}
    default_rope: ClassVar[Mapping[str, Any]] = {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    }

    num_local_experts: int
    num_experts_per_tok: int
    experts_per_token: int | None = None
    swiglu_alpha: float
    swiglu_limit: float
    initial_context_length: int | None = None
    sliding_window: int | None
    layer_types: tuple[str, ...] | None
    attention_bias: bool
    is_mxfp4: bool = False

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        quantization = raw.get("quantization_config")
        is_mxfp4 = isinstance(quantization, Mapping) and quantization.get("quant_method") == "mxfp4"
        return replace(super().from_hf(raw), is_mxfp4=is_mxfp4)

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        chosen, context = self.num_experts_per_tok, self.initial_context_length
        if self.experts_per_token not in (None, chosen):
            yield f"experts_per_token={self.experts_per_token} is not num_experts_per_tok={chosen}"
        if self.rope.type == "yarn" and context not in (None, self.rope.original_max_position_embeddings):
            yield (
                f"initial_context_length={context} is not "
                f"original_max_position_embeddings={self.rope.original_max_position_embeddings}"
            )
        if self.swiglu_limit <= 0:
            yield f"swiglu_limit={self.swiglu_limit} is not positive"
        if self.layer_types is None:
            return
        yield from faults_of_kinds("layer_types", self.layer_types, self.num_hidden_layers, WINDOW_KINDS)
        if "sliding_attention" in self.layer_types and self.sliding_window is None:
            yield "layer_types has 'sliding_attention' with sliding_window=None"

    @property
    def windows(self) -> tuple[int | None, ...]:
        if self.layer_types is None:
            return tuple(None if i % 2 else self.sliding_window for i in range(self.num_hidden_layers))
        return windows_by_kind(self.layer_types, self.sliding_window)


GATE_UP = ("moe.gate.kernel", "moe.up.kernel")

TABLE = decoder_table(
    ATTN_NORM,
    *ATTENTION,
    *when("attention_bias", *QKV_BIAS, O_BIAS),
    Map("self_attn.sinks", "attn.sinks", "N"),
    Map("post_attention_layernorm.weight", "moe_norm.scale", "D"),
    Map("mlp.router.weight", "moe.router.kernel", "E D -> D E"),
    Map("mlp.router.bias", "moe.router.bias", "E"),
    # Rows or columns of gate and up alternate. The orientation depends on the encoding.
    Map("mlp.experts.gate_up_proj", GATE_UP, "E D (M (1 + 1)) -> E D M, E D M", when="not is_mxfp4"),
    Map("mlp.experts.gate_up_proj", GATE_UP, "E (M (1 + 1)) D -> E D M, E D M", when="is_mxfp4"),
    Map("mlp.experts.gate_up_proj_bias", ("moe.gate.bias", "moe.up.bias"), "E (M (1 + 1)) -> E M, E M"),
    Map("mlp.experts.down_proj", "moe.down.kernel", "E M D", when="not is_mxfp4"),
    Map("mlp.experts.down_proj", "moe.down.kernel", "E D M -> E M D", when="is_mxfp4"),
    Map("mlp.experts.down_proj_bias", "moe.down.bias", "E D"),
)

FAMILY = family(Config, TABLE, "gpt-oss", "GptOssForCausalLM")
