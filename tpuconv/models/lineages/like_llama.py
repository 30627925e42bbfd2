"""Families that are Llama but for their norms, MLPs or activations."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.partial_rope import PartialRopeConfig
from tpuconv.models.common.rope import PARAMETER_KEYS
from tpuconv.models.common.rows import ATTENTION, MLP, O_BIAS, PLAIN_MLP, QKV_BIAS, when
from tpuconv.models.common.windows import OneWindow
from tpuconv.models.common.wrapper import HEARS, SEES
from tpuconv.models.declare import decoder, wrapper
from tpuconv.models.lineages.llama import LLAMA, NO_BIAS
from tpuconv.models.parts import Attn, Factors, Mlp, Norms
from tpuconv.notation.letters import Word, declare
from tpuconv.notation.table import Map, under

declare(
    input_vocab=Word("tokens of the embedding, where the head has fewer rows", as_="V"),
)

NEMOTRON = decoder(
    "nemotron",
    "Nemotron-3 8B, Nemotron-4, Minitron",
    "NemotronForCausalLM",
    Norms(kind="centered layer"),
    Attn("attention_bias"),
    Mlp("plain", "relu2", bias="mlp_bias"),
    config=PartialRopeConfig,
    defaults={"partial_rotary_factor": 0.5},
    hf_names={"rms_norm_eps": "norm_eps"},
    only={"hidden_act": ("relu2",)},
)

JAIS2 = decoder(
    "jais2",
    "Jais 2 8B, 70B",
    "Jais2ForCausalLM",
    Norms(kind="layer"),
    Attn("attention_bias"),
    Mlp("plain", "relu2", bias="mlp_bias"),
    hf_names={"rms_norm_eps": "layer_norm_eps"},
    only={"hidden_act": ("relu2",)},
)

STARCODER2 = decoder(
    "starcoder2",
    "StarCoder2",
    "Starcoder2ForCausalLM",
    Norms(kind="layer"),
    Attn("use_bias"),
    Mlp(
        "plain",
        "gelu_tanh",
        bias="use_bias",
        rows=under(
            "mlp",
            "mlp",
            Map("c_fc.weight", "up.kernel", "F D -> D F"),
            Map("c_proj.weight", "down.kernel", "D F -> F D"),
            *when("use_bias", Map("c_fc.bias", "up.bias", "F"), Map("c_proj.bias", "down.bias", "D")),
        ),
        keys=("sliding_window",),
    ),
    config=(OneWindow, DecoderConfig),
    hf_names={"rms_norm_eps": "norm_epsilon"},
    only={"hidden_act": ("gelu_pytorch_tanh",)},
)


class StableLmConfig(PartialRopeConfig):
    """Attention and MLP may be side by side, after the same norm."""

    use_parallel_residual: bool


STABLELM = decoder(
    "stablelm",
    "StableLM 2, StableLM 3B, StableCode",
    "StableLmForCausalLM",
    Norms(
        kind="layer",
        module="modules.like_llama:SideBySideBlock",
        rows=(
            Map("input_layernorm.weight", "attn_norm.scale", "D"),
            Map("input_layernorm.bias", "attn_norm.bias", "D"),
            *when(
                "not use_parallel_residual",
                Map("post_attention_layernorm.weight", "mlp_norm.scale", "D"),
                Map("post_attention_layernorm.bias", "mlp_norm.bias", "D"),
            ),
        ),
    ),
    Attn(
        "use_qkv_bias",
        out_bias=False,
        norms="all heads",
        normed="qk_layernorm",
        norm_kind="layer of heads",
        rows=(
            *ATTENTION,
            *when("use_qkv_bias", *QKV_BIAS),
            *when(
                "qk_layernorm",
                Map("self_attn.q_layernorm.norms.{N}.weight", "attn.q_norm.scale", "H -> N H"),
                Map("self_attn.k_layernorm.norms.{K}.weight", "attn.k_norm.scale", "H -> K H"),
            ),
        ),
    ),
    Mlp(),
    config=StableLmConfig,
    keys={"use_parallel_residual": bool},
    defaults={"partial_rotary_factor": 0.25},
    hf_names={"rms_norm_eps": "layer_norm_eps"},
)

ORION = decoder(
    "orion",
    "Orion 14B",
    "OrionForCausalLM",
    Norms(kind="layer"),
    Attn(),
    Mlp(),
    only=NO_BIAS,
    # The sizes of OrionStarAI/Orion-14B-Base.
    defaults={
        **{"vocab_size": 84608, "hidden_size": 5120, "intermediate_size": 15360, "num_hidden_layers": 40},
        **{"num_attention_heads": 40, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
        "tie_word_embeddings": False,
    },
)

APERTUS = decoder(
    "apertus",
    "Apertus 8B, 70B",
    "ApertusForCausalLM",
    Norms(names=("attention_layernorm", "feedforward_layernorm"), between=True),
    Attn("attention_bias", norms="each head"),
    Mlp(
        "plain",
        module="modules.like_llama:XIELUMLP",
        rows=under(
            "mlp",
            "mlp",
            *PLAIN_MLP,
            Map("act_fn.alpha_p", "xielu.alpha_p", "1"),
            Map("act_fn.alpha_n", "xielu.alpha_n", "1"),
            Map("act_fn.beta", "xielu.beta", "", buffer=True),
            Map("act_fn.eps", "xielu.eps", "", buffer=True),
        ),
    ),
    default_rope={
        "rope_type": "llama3",
        "rope_theta": 12000000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    only={"hidden_act": ("xielu",), "qk_norm": (True,), "post_norm": (False,), "mlp_bias": (False,)},
)


@family_config
class PrunedHeadConfig(APERTUS.config):  # type: ignore[misc, name-defined]  # made by `decoder`
    """The head has rows for the first `output_vocab_size` tokens alone: those after them stand for images and
    sounds."""

    model_type: ClassVar[str] = "apertus1p5_text"

    output_vocab_size: int | None

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        rows = self.output_vocab_size
        if rows is not None and rows > self.vocab_size:
            yield f"output_vocab_size={rows} is more than vocab_size={self.vocab_size}"
        elif rows not in (None, self.vocab_size) and self.tie_word_embeddings:
            yield f"output_vocab_size={rows} with tie_word_embeddings=True"

    @property
    def sizes(self) -> dict[str, int]:
        return {**super().sizes, "V": self.output_vocab_size or self.vocab_size, "input_vocab": self.vocab_size}


APERTUS1P5_TEXT = APERTUS.but(
    "apertus1p5_text",
    "Apertus 1.5, the text model on its own",
    "Apertus1p5TextForCausalLM",
    config=PrunedHeadConfig,
    base="modules.like_llama:MoreTokensThanLogits",
    table=APERTUS.table.with_rows(
        [replace(row, layout="input_vocab D") if row.layout == "V D" else row for row in APERTUS.table]
    ),
)

APERTUS1P5 = wrapper(
    "apertus1p5",
    "Apertus 1.5 8B, 70B, text",
    "Apertus1p5ForConditionalGeneration",
    text=APERTUS1P5_TEXT,
    outside={"vision_tokenizer": SEES, "audio_tokenizer": HEARS},
)

BITNET = decoder(
    "bitnet",
    "BitNet b1.58 2B4T",
    "BitNetForCausalLM",
    Norms(),
    Attn(
        "attention_bias",
        module="modules.like_llama:SubNormedAttention",
        rows=(
            *ATTENTION,
            Map("self_attn.attn_sub_norm.weight", "attn.sub_norm.scale", "(N H) -> N H"),
            *when("attention_bias", *QKV_BIAS, O_BIAS),
        ),
    ),
    Mlp(
        module="modules.like_llama:SubNormedMLP",
        rows=under("mlp", "mlp", *MLP, Map("ffn_sub_norm.weight", "sub_norm.scale", "F")),
    ),
    only={"hidden_act": ("relu2",)},
)


class NanoChatConfig(DecoderConfig):
    """Logits may have a soft limit."""

    final_logit_softcapping: float | None

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.final_logit_softcapping is not None and self.final_logit_softcapping <= 0:
            yield f"final_logit_softcapping={self.final_logit_softcapping} is not positive"


NANOCHAT = decoder(
    "nanochat",
    "nanochat",
    "NanoChatForCausalLM",
    Norms(kind="plain RMS"),
    Attn("attention_bias", module="modules.like_llama:BackwardAttention"),
    Mlp(
        "plain",
        "relu2",
        rows=under(
            "mlp",
            "mlp",
            Map("fc1.weight", "up.kernel", "F D -> D F"),
            Map("fc2.weight", "down.kernel", "D F -> F D"),
        ),
    ),
    Factors(cap="final_logit_softcapping"),
    base="modules.like_llama:NormedInputs",
    config=NanoChatConfig,
    only={"hidden_act": ("relu2",)},
)


class DifferenceConfig(DecoderConfig):
    """`lambda_std_dev` is of training."""

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.sizes["K"] % 2:
            yield f"num_key_value_heads={self.sizes['K']} is odd: heads are in pairs"

    @property
    def unscannable(self) -> str:
        return "each layer has a weight of its own for what it subtracts"


DIFFLLAMA = decoder(
    "diffllama",
    "DiffLlama",
    "DiffLlamaForCausalLM",
    Norms(module="modules.like_llama:NumberedBlock"),
    Attn(
        "attention_bias",
        module="modules.like_llama:DifferenceAttention",
        rows=(
            *ATTENTION,
            *when("attention_bias", *QKV_BIAS, O_BIAS),
            *(Map(f"self_attn.lambda_{name}", f"attn.lambda_{name}", "H") for name in ("q1", "k1", "q2", "k2")),
        ),
    ),
    Mlp(),
    config=DifferenceConfig,
    keys={"lambda_std_dev": float | None},
)


@family_config
class SkippingConfig(OneWindow, DecoderConfig):
    """The hidden states that enter some layers are kept, and mixed with those that enter later ones. The defaults come
    from the release's `configuration_solar.py`, where layers may have numbers that the model does not reach.

    Attributes:
        bskcn_1, bskcn_2: the layers whose input is kept in the first place, and in the second.
        bskcn_3, bskcn_4: the layers whose input is mixed with what the first place has, and the second.
        bskcn_tv: the weight of what was kept, in training and after it.
    """

    only: ClassVar = NO_BIAS

    sliding_window: int | None = 2047
    bskcn_1: tuple[int, ...] = (12, 20, 32, 44)
    bskcn_2: tuple[int, ...] = (20, 32)
    bskcn_3: tuple[int, ...] = (16, 24, 36, 48)
    bskcn_4: tuple[int, ...] = (28, 40)
    bskcn_tv: tuple[float, ...] = (0.9, 0.8)

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        for place, (kept, mixed) in enumerate(self.skips, 1):
            if early := [layer for layer in mixed if not any(0 <= other <= layer for other in kept)]:
                yield f"bskcn_{place + 2} has layer {early[0]}, before which bskcn_{place} keeps nothing"
        if len(self.bskcn_tv) != 2:
            yield f"bskcn_tv has {len(self.bskcn_tv)} weights: it has one in training and one after it"

    @property
    def skips(self) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
        """For each place the layers whose input is kept there, and those whose input is mixed with it."""
        return (self.bskcn_1, self.bskcn_3), (self.bskcn_2, self.bskcn_4)

    @property
    def unscannable(self) -> str:
        return "inputs of some of its layers are mixed with inputs of earlier layers"

    @property
    def inseparable(self) -> str:
        return self.unscannable


SOLAR = decoder(
    "solar",
    "Solar Pro Preview",
    "SolarForCausalLM",
    Norms(),
    Attn(),
    Mlp(),
    base="modules.like_llama:SkippingDecoder",
    config=SkippingConfig,
    defaults={
        **{"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32},
        **{"num_attention_heads": 32, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6},
        **{"tie_word_embeddings": False},
    },
)


class TeleChat3Config(LLAMA.config):  # type: ignore[misc, name-defined]  # made by `decoder`
    """Rotary positions of the type "telechat3-yarn" are YaRN with another factor of angles, 0.07 ln(factor) + 1."""

    @classmethod
    def in_our_keys(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        out: dict[str, Any] = super().in_our_keys(raw)
        return out | {key: _as_yarn(out[key]) for key in PARAMETER_KEYS if out.get(key)}


def _as_yarn(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns rotary parameters of TeleChat3 as YaRN's, others as they are."""
    factor, kinds = (
        given.get("factor"),
        {key: given[key] for key in ("rope_type", "type") if given.get(key) is not None},
    )
    if list(kinds.values()) not in (["telechat3-yarn"], ["telechat3-yarn"] * 2):
        return given
    if not isinstance(factor, int | float) or factor < 1:
        return given
    return {**given, **dict.fromkeys(kinds, "yarn"), "attention_factor": 0.07 * math.log(factor) + 1}


TELECHAT3 = LLAMA.but(
    "telechat3",
    "TeleChat3 36B",
    "TeleChat3ForCausalLM",
    "Telechat3ForCausalLM",
    config=TeleChat3Config,
    # The sizes of the released model.
    defaults={
        **{"vocab_size": 131072, "hidden_size": 6144, "intermediate_size": 24576, "num_hidden_layers": 64},
        **{"num_attention_heads": 48, "num_key_value_heads": 8, "max_position_embeddings": 32768},
        **{"rms_norm_eps": 1e-5, "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False},
    },
    default_rope={"rope_theta": 1000000.0},
)


@family_config
class TeleFlmFactors(DecoderConfig):
    """Factors of embeddings and logits (arXiv:2404.16645, section 3.2), if `use_mup` is set."""

    use_mup: bool
    input_mult: float
    output_mult: float
    mup_scale_factor: float

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.mup_scale_factor <= 0:
            yield f"mup_scale_factor={self.mup_scale_factor} is not positive"

    @property
    def embedding_factor(self) -> float:
        """The factor of embeddings."""
        return self.input_mult if self.use_mup else 1.0

    @property
    def logit_factor(self) -> float:
        """The factor of logits."""
        return self.output_mult / self.mup_scale_factor if self.use_mup else 1.0


TELEFLM = LLAMA.but(
    "TeleFLM",
    "Tele-FLM 52B, FLM-2",
    "TeleFLMForCausalLM",
    Attn(),
    Mlp(),
    Factors(embedding="embedding_factor", logits="logit_factor"),
    config=TeleFlmFactors,
    only=NO_BIAS,
    # The sizes of the released model, without factors, as servers read a file without them.
    defaults={
        **{"vocab_size": 80000, "hidden_size": 8192, "intermediate_size": 21824, "num_hidden_layers": 64},
        **{"num_attention_heads": 64, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
        **{"tie_word_embeddings": False, "use_mup": False, "input_mult": 1.0, "output_mult": 1.0},
        "mup_scale_factor": 1.0,
    },
)
