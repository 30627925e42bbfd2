"""ZAYA: config and mapping table."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.rope import PLAIN_ROPE, Rope
from tpuconv.models.common.rows import PRE_NORMS, STACKED_EXPERTS, decoder_table, when
from tpuconv.models.common.sparse import ChosenExperts
from tpuconv.models.common.windows import TwoPartialRopesConfig, refuse_flat_ropes
from tpuconv.models.registry import family
from tpuconv.notation.letters import Word, declare
from tpuconv.notation.table import Map, under

declare(
    channel_taps=Word("taps of the convolution of each channel, before the convolution of heads"),
    head_taps=Word("taps of the convolution that mixes the channels of a head"),
    head_inputs=Word("head dimension, as the input axis of a square matrix"),
    half_values=Word("half of the width of all values"),
    router_dim=Word("width of the hidden states of a router"),
    router_inputs=Word("width of the hidden states of a router, as the input axis of a square matrix"),
    router_choices=Word("experts of a router, and the choice of none"),
)

ZAYA_KINDS = {"hybrid": "full_attention", "hybrid_sliding": "sliding_attention"}
"""The `layer_types` of config.json, and the names that other families have for them."""


@family_config
class Config(ChosenExperts, TwoPartialRopesConfig):
    """The keys of config.json. Each token has one expert, or none."""

    model_type: ClassVar[str] = "zaya"
    hf_names: ClassVar[Mapping[str, str]] = {"intermediate_size": "moe_intermediate_size"}
    only: ClassVar = {"num_experts_per_tok": (1,)}
    full_every: ClassVar[int] = 1
    rotary_part: ClassVar[float] = 1.0

    num_experts: int
    num_experts_per_tok: int
    attention_bias: bool
    lm_head_bias: bool
    router_hidden_size: int
    cca_time0: int
    cca_time1: int
    rope: Rope = Rope(theta=5_000_000.0)
    local_rope: Rope = PLAIN_ROPE
    full_rotary: float = 0.5
    local_rotary: float = 0.5

    @classmethod
    def in_our_keys(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """As `DecoderConfig.in_our_keys`, with the `layer_types` of other families. Releases have a `rope_type` beside
        the rotary positions of each type of layer, which transformers ignores."""
        out = super().in_our_keys(raw)
        if isinstance(kinds := out.get("layer_types"), list):
            out["layer_types"] = [ZAYA_KINDS.get(kind, kind) if isinstance(kind, str) else kind for kind in kinds]
        if isinstance(ropes := out.get("rope_parameters"), Mapping):
            out["rope_parameters"] = {ZAYA_KINDS.get(key, key): own for key, own in ropes.items() if key != "rope_type"}
        return out

    @classmethod
    def read_ropes(cls, raw: Mapping[str, Any], context: int) -> dict[str, Any]:
        """As `TwoPartialRopesConfig.read_ropes`; without `rope_parameters` half of each head has rotary positions."""
        refuse_flat_ropes(cls, raw)
        return super().read_ropes(raw, context) if raw.get("rope_parameters") else {}

    @property
    def has_logit_bias(self) -> bool:
        """True if the logits have a bias."""
        return self.lm_head_bias and not self.head.kind

    @property
    def layer_sets(self) -> dict[str, Sequence[int]]:
        return {**super().layer_sets, "later_layers": range(1, self.num_hidden_layers)}

    @property
    def unscannable(self) -> str:
        return "the router of the first layer reads no other" if self.num_hidden_layers > 1 else ""

    @property
    def inseparable(self) -> str:
        return "its routers read the router of the layer before"

    @property
    def sizes(self) -> dict[str, int]:
        sizes = super().sizes
        return {
            **sizes,
            "taps": self.cca_time0 + self.cca_time1 - 1,
            "channel_taps": self.cca_time0,
            "head_taps": self.cca_time1,
            "head_inputs": sizes["H"],
            "half_values": sizes["K"] * sizes["H"] // 2,
            "router_dim": self.router_hidden_size,
            "router_inputs": self.router_hidden_size,
            "router_choices": self.num_experts + 1,
        }


def convolution_rows(hf: str, axes: str, kernel: str, bias: str) -> tuple[Map, ...]:
    """Returns the rows of a convolution of queries and keys.

    Args:
        hf: its name in releases.
        axes: how the axes of each channel become the axes of each head.
        kernel, bias: the names of the parameters.
    """
    inputs, outputs = axes.split(" -> ")
    both = tuple((f"{name}_conv.{kernel}", f"{name}_conv.{bias}") for name in ("q", "k"))
    kernels, biases = zip(*both, strict=True)
    return (
        Map(f"{hf}.weight", kernels, f"((N H) + (K H)) {inputs} -> N {outputs}, K {outputs}"),
        Map(f"{hf}.bias", biases, "((N H) + (K H)) -> N H, K H"),
    )


def scaling_rows(hf: str, jax: str) -> tuple[Map, ...]:
    """Returns the rows of the factors and biases of hidden states and of what a part adds to them."""
    return (
        Map(f"{hf}.hidden_states_scale", f"{jax}.scale", "D"),
        Map(f"{hf}.hidden_states_bias", f"{jax}.bias", "D"),
        Map(f"{hf}.residual_scale", f"{jax}.residual_scale", "D"),
        Map(f"{hf}.residual_bias", f"{jax}.residual_bias", "D"),
    )


CONVOLVED_ATTENTION = (
    *under(
        "qkv_proj",
        "",
        Map("q_proj.weight", "q.kernel", "(N H) D -> D N H"),
        Map("k_proj.weight", "k.kernel", "(K H) D -> D K H"),
        Map("v_proj_current.weight", "v.kernel", "half_values D -> D half_values"),
        Map("v_proj_delayed.weight", "v_delayed.kernel", "half_values D -> D half_values"),
        *convolution_rows("conv_qk_depthwise", "1 channel_taps -> H channel_taps", "channels", "channels_bias"),
        *convolution_rows(
            "conv_qk_grouped", "head_inputs head_taps -> head_taps head_inputs H", "heads.kernel", "heads.bias"
        ),
        *when(
            "attention_bias",
            Map("q_proj.bias", "q.bias", "(N H) -> N H"),
            Map("k_proj.bias", "k.bias", "(K H) -> K H"),
            Map("v_proj_current.bias", "v.bias", "half_values"),
            Map("v_proj_delayed.bias", "v_delayed.bias", "half_values"),
        ),
    ),
    Map("qk_norm.temp", "k_scale", "K"),
    Map("o_proj.weight", "o.kernel", "D (N H) -> N H D"),
    Map("o_proj.bias", "o.bias", "D", when="attention_bias"),
)
CHAINED_ROUTER = (
    Map("down_proj.weight", "down.kernel", "router_dim D -> D router_dim"),
    Map("down_proj.bias", "down.bias", "router_dim"),
    Map("router_mlp.norm.weight", "norm.scale", "router_dim"),
    *(
        row
        for name in ("fc1", "fc2")
        for row in (
            Map(f"router_mlp.{name}.weight", f"{name}.kernel", "router_dim router_inputs -> router_inputs router_dim"),
            Map(f"router_mlp.{name}.bias", f"{name}.bias", "router_dim"),
        )
    ),
    Map("router_mlp.out_proj.weight", "out.kernel", "router_choices router_dim -> router_dim router_choices"),
    Map("balancing_biases", "correction", "router_choices", buffer=True),
)

TABLE = decoder_table(
    *PRE_NORMS,
    *under("self_attn", "attn", *CONVOLVED_ATTENTION),
    *scaling_rows("post_attention_residual_scale", "attn_join"),
    *under("mlp", "moe", *under("gate", "router", *CHAINED_ROUTER), *STACKED_EXPERTS),
    *scaling_rows("post_mlp_residual_scale", "mlp_join"),
    others=(
        Map(
            "model.layers.{later_layers}.mlp.gate.router_states_scale",
            "layers.{later_layers}.moe.router.scale",
            "router_dim",
        ),
        Map("model.input_hidden_states_scale", "entry.scale", "D"),
        Map("model.input_hidden_states_bias", "entry.bias", "D"),
        Map("lm_head.bias", "logit_bias.bias", "V", when="has_logit_bias"),
    ),
)

FAMILY = family(Config, TABLE, "ZAYA1", "ZayaForCausalLM")
