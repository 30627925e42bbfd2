"""EXAONE 3, 3.5 and Deep: config and mapping table."""

from functools import reduce
from typing import ClassVar

from tpuconv.models.common.defaults import family_config
from tpuconv.models.llama import family as llama
from tpuconv.models.registry import family


@family_config
class Config(llama.Config):
    """The keys of config.json."""

    model_type: ClassVar[str] = "exaone"
    only: ClassVar = {"activation_function": ("silu",), "attention_bias": (False,), "mlp_bias": (False,)}
    aliases: ClassVar = {"num_layers": "num_hidden_layers", "layer_norm_epsilon": "rms_norm_eps"}

    vocab_size: int = 102400
    intermediate_size: int = 16384
    rms_norm_eps: float = 1e-5


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

TABLE = llama.TABLE.renamed(lambda name: reduce(lambda text, pair: text.replace(*pair), EXAONE_NAMES, name))

FAMILY = family(Config, TABLE, "EXAONE 3, 3.5, Deep", "ExaoneForCausalLM", model="llama")
