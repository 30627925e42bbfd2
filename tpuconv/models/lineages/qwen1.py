"""Qwen, the first version."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.gpt import qkv_rows
from tpuconv.models.declare import decoder
from tpuconv.models.parts import Attn, Mlp, Norms
from tpuconv.notation.table import Map, under


@family_config
class Qwen1Config(DecoderConfig):
    """The keys of config.json. Beyond `seq_length` tokens the release changes the angles of all positions and the
    queries (`use_dynamic_ntk`, `use_logn_attn`), at each length in another way: a longer text is refused."""

    only: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "no_bias": (True,),
        "rotary_pct": (1.0,),
        "scale_attn_weights": (True,),
    }
    hf_names: ClassVar[Mapping[str, str]] = {
        "head_dim": "kv_channels",
        "rms_norm_eps": "layer_norm_epsilon",
        "max_position_embeddings": "seq_length",
    }
    aliases: ClassVar[Mapping[str, str]] = {"rotary_emb_base": "rope_theta"}
    left_out: ClassVar[frozenset[str]] = frozenset(
        {
            *("use_dynamic_ntk", "use_logn_attn", "max_position_embeddings"),
            *("attn_dropout_prob", "emb_dropout_prob", "bf16", "fp16", "fp32", "onnx_safe", "softmax_in_fp32"),
            *("use_cache_kernel", "use_cache_quantization", "use_flash_attn"),
        }
    )

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.intermediate_size % 2:
            yield f"intermediate_size={self.intermediate_size}, which both halves of an MLP share, is odd"

    @property
    def sizes(self) -> dict[str, int]:
        return {**super().sizes, "F": self.intermediate_size // 2}

    @property
    def position_limit(self) -> int | None:
        return self.max_position_embeddings


QWEN = decoder(
    "qwen",
    "Qwen 1.8B, 7B, 14B, 72B",
    "QWenLMHeadModel",
    Norms(names=("ln_1", "ln_2")),
    Attn(
        True,
        out_bias=False,
        rows=(
            *qkv_rows("attn.c_attn"),
            Map("attn.c_attn.bias", ("attn.q.bias", "attn.k.bias", "attn.v.bias"), "((N + K + K) H) -> N H, K H, K H"),
            Map("attn.c_proj.weight", "attn.o.kernel", "D (N H) -> N H D"),
        ),
    ),
    Mlp(
        rows=under(
            "mlp",
            "mlp",
            Map("w1.weight", "up.kernel", "F D -> D F"),
            Map("w2.weight", "gate.kernel", "F D -> D F"),
            Map("c_proj.weight", "down.kernel", "D F -> F D"),
        )
    ),
    config=Qwen1Config,
    names={
        "model.embed_tokens": "transformer.wte",
        "model.layers.{L}": "transformer.h.{L}",
        "model.norm": "transformer.ln_f",
    },
    # As `configuration_qwen.py` of the releases has them.
    defaults={
        **{"vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32},
        **{"num_attention_heads": 32, "num_key_value_heads": None, "head_dim": 128, "max_position_embeddings": 8192},
        **{"rms_norm_eps": 1e-6, "tie_word_embeddings": False},
    },
)
