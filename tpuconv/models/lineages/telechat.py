"""TeleChat 2."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from tpuconv.errors import ConfigError
from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.rope import Rope
from tpuconv.models.common.rows import MLP
from tpuconv.models.declare import decoder
from tpuconv.models.parts import Attn, Mlp, Norms
from tpuconv.notation.table import Map, under


@family_config
class TeleChatConfig(DecoderConfig):
    """The keys of config.json. The base of rotary positions is 10,000, and grows with the length of the training
    (NTK-aware scaling), as `RotaryEmbedding` of the releases has it; `rope_theta` has no effect there. A longer text
    would change the angles of all its tokens once more, at each length in another way: it is refused. `base_seqlen`
    has to be there: the first TeleChat, whose other keys are the same, has 4096 in its code instead."""

    base_seqlen: int = 8192

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if (width := self.sizes["H"] * self.num_attention_heads) != self.hidden_size:
            yield f"the heads are {width} wide together, which is not hidden_size={self.hidden_size}"

    @classmethod
    def read_ropes(cls, raw: Mapping[str, Any], context: int) -> dict[str, Any]:
        """See `DecoderConfig.read_ropes`.

        Raises:
            ConfigError: there is no `base_seqlen`.
        """
        if "base_seqlen" not in raw:
            raise ConfigError(
                "config.json does not have base_seqlen, by which the angles of rotary positions are computed",
                hint="add it, as the code of the release has it: 4096 in the first TeleChat, 8192 in TeleChat 2",
            )
        width, heads = (
            raw.get(cls._key(field)) or getattr(cls, field) for field in ("hidden_size", "num_attention_heads")
        )
        head = width // heads
        growth = max(1, 2 ** math.ceil(math.log2(context / raw["base_seqlen"]) + 1) - 1)
        return {"rope": Rope(theta=Rope.theta * growth ** (head / (head - 2)) if growth > 1 else Rope.theta)}

    @property
    def position_limit(self) -> int | None:
        return self.max_position_embeddings


TELECHAT = decoder(
    "telechat",
    "TeleChat 2 3B, 7B, 35B, 115B",
    "TeleChat2ForCausalLM",
    "TelechatForCausalLM",
    Norms(),
    Attn(
        out_bias=True,
        rows=under(
            "self_attention",
            "attn",
            Map("query.weight", "q.kernel", "(N H) D -> D N H"),
            Map("key_value.weight", ("k.kernel", "v.kernel"), "(K (H + H)) D -> D K H, D K H"),
            Map("dense.weight", "o.kernel", "D (N H) -> N H D"),
            Map("dense.bias", "o.bias", "D"),
        ),
    ),
    Mlp(
        module="modules.like_llama:DownBiasedMLP",
        rows=under("mlp", "mlp", *MLP, Map("down_proj.bias", "down.bias", "D")),
    ),
    config=TeleChatConfig,
    hf_names={
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "intermediate_size": "ffn_hidden_size",
        "rms_norm_eps": "layer_norm_epsilon",
        "max_position_embeddings": "training_seqlen",
    },
    only={
        "apply_residual_connection_post_layernorm": (False,),
        "embed_layernorm": (False,),
        "rope_theta": (10000, None),
        "rope_scaling": (None,),
        "rope_parameters": (None,),
    },
    left_out=frozenset({"flash_attn", "logn", "max_position_embeddings", "seq_length"}),
    derived=DecoderConfig.derived | {"head_dim"},
    names={
        "model.embed_tokens": "transformer.word_embeddings",
        "model.layers.{L}": "transformer.h.{L}",
        "model.norm": "transformer.ln_f",
    },
    # As `configuration_telechat2.py` of the releases has them.
    defaults={
        **{"vocab_size": 160256, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 30},
        **{"num_attention_heads": 32, "num_key_value_heads": None, "head_dim": None, "max_position_embeddings": 8192},
        **{"rms_norm_eps": 1e-5, "tie_word_embeddings": True},
    },
)
