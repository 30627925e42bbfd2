"""Llama and its near relatives."""

from collections.abc import Iterator
from typing import ClassVar

from tpuconv.models.common.both_ways import EitherWay
from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.gpt import GPT_QKV
from tpuconv.models.common.rope import Rope, layers_with_rope
from tpuconv.models.common.windows import OneWindow, PatternConfig
from tpuconv.models.declare import decoder, wrapper
from tpuconv.models.parts import Attn, Factors, Mlp, Norms
from tpuconv.notation.table import Map, MappingTable, under

NO_BIAS = {"attention_bias": (False,), "mlp_bias": (False,)}


@family_config
class MistralConfig(OneWindow, DecoderConfig):
    """Mistral: no biases, and a sliding window in all layers."""

    model_type: ClassVar[str] = "mistral"
    only: ClassVar = NO_BIAS

    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None


@family_config
class LlamaConfig(EitherWay):
    """The keys of Llama."""

    model_type: ClassVar[str] = "llama"

    attention_bias: bool
    mlp_bias: bool


@family_config
class BidirectionalConfig(LlamaConfig):
    """NVIDIA's Llama embedding models and rerankers, whose class is their own: no token is hidden from another.
    `Head` reads `pooling` and `temperature`."""

    model_type: ClassVar[str] = "llama_bidirec"
    only: ClassVar = {"is_causal": (False,)}
    left_out: ClassVar[frozenset[str]] = EitherWay.left_out | {"temperature"}

    is_causal: bool = False


LLAMA = decoder(
    "llama",
    "Llama 2, 3, 3.1, 3.2, 3.3; Mistral; SmolLM2; Llama Nemotron Embed and Rerank",
    "LlamaForCausalLM",
    Norms(between=True),
    Attn("attention_bias"),
    Mlp(bias="mlp_bias"),
    config=LlamaConfig,
    types={"MistralForCausalLM": "mistral", "LlamaBidirectionalForCausalLM": BidirectionalConfig.model_type},
    variants={"mistral": MistralConfig, BidirectionalConfig.model_type: BidirectionalConfig},
)

SEED_OSS = decoder(
    "seed_oss",
    "Seed-OSS",
    "SeedOssForCausalLM",
    Norms(),
    Attn("attention_bias", out_bias="attention_out_bias"),
    Mlp(bias="mlp_bias"),
)

ARCEE = decoder(
    "arcee",
    "AFM-4.5B",
    "ArceeForCausalLM",
    Norms(),
    Attn("attention_bias"),
    Mlp("plain", "relu2", bias="mlp_bias"),
    only={"hidden_act": ("relu2",)},
)


class HeliumConfig(DecoderConfig):
    """The output of attention is as wide as the model."""

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if (width := self.sizes["H"] * self.num_attention_heads) != self.hidden_size:
            yield f"the heads are {width} wide together, which is not hidden_size={self.hidden_size}"


HELIUM = decoder(
    "helium",
    "Helium 1 2B",
    "HeliumForCausalLM",
    Norms(kind="scaled RMS"),
    Attn("attention_bias", out_bias=False, rope="pairs"),
    Mlp(bias="mlp_bias"),
    config=HeliumConfig,
)


@family_config
class SmolLM3Config(PatternConfig):
    """`no_rope_layers` has 1 for a layer WITH rotary positions; without it every `no_rope_layer_interval`-th layer has
    none. Without `layer_types` those have the window, if it is used."""

    use_sliding_window: bool
    no_rope_layers: tuple[int, ...] | None
    no_rope_layer_interval: int

    def contradictions(self) -> Iterator[str]:
        if len(self.with_rope) != self.num_hidden_layers:
            yield f"no_rope_layers has {len(self.with_rope)} entries for num_hidden_layers={self.num_hidden_layers}"
            return
        yield from super().contradictions()
        if "sliding_attention" in self.kinds and not self.use_sliding_window:
            yield "layers have 'sliding_attention' with use_sliding_window=False"

    @property
    def with_rope(self) -> tuple[bool, ...]:
        """For each layer, True if it has rotary positions."""
        return layers_with_rope(self.no_rope_layers, self.no_rope_layer_interval, self.num_hidden_layers)

    @property
    def kinds(self) -> tuple[str, ...]:
        if self.layer_types is not None:
            return self.layer_types
        has_window = self.use_sliding_window and self.sliding_window is not None
        return tuple("sliding_attention" if has_window and not rope else "full_attention" for rope in self.with_rope)

    @property
    def ropes(self) -> tuple[Rope | None, ...]:
        return tuple(self.rope if rope else None for rope in self.with_rope)


SMOLLM3 = decoder(
    "smollm3",
    "SmolLM3",
    "SmolLM3ForCausalLM",
    Norms(),
    Attn("attention_bias"),
    Mlp(bias="mlp_bias"),
    config=SmolLM3Config,
)


class CwmConfig(PatternConfig):
    """Without `layer_types` the first of every four layers sees all tokens."""

    attention_bias: ClassVar[bool] = False
    mlp_bias: ClassVar[bool] = False

    @property
    def kinds(self) -> tuple[str, ...]:
        layers = range(self.num_hidden_layers)
        return self.layer_types or tuple("sliding_attention" if i % 4 else "full_attention" for i in layers)


CWM = LLAMA.but(
    "cwm",
    "CWM",
    "CwmForCausalLM",
    config=CwmConfig,
    only=NO_BIAS,
    default_rope={
        "rope_type": "llama3",
        "rope_theta": 1e6,
        "factor": 16.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
)


class MinistralConfig(PatternConfig):
    """Without `layer_types` all layers have the window."""

    attention_bias: ClassVar[bool] = False
    mlp_bias: ClassVar[bool] = False

    @property
    def kinds(self) -> tuple[str, ...]:
        kind = "full_attention" if self.sliding_window is None else "sliding_attention"
        return self.layer_types or (kind,) * self.num_hidden_layers


MINISTRAL = LLAMA.but("ministral", "Ministral 8B (2410)", "MinistralForCausalLM", config=MinistralConfig)

IQUESTCODER = LLAMA.but(
    "iquestcoder",
    "IQuest-Coder V1",
    "IQuestCoderForCausalLM",
    "LlamaForCausalLM",
    only={"clip_qkv": (None,), "use_sliding_window": (False,)},
)


class BiasesTogether:
    """Either all matrices have a bias or none."""

    attention_bias: bool
    mlp_bias: bool

    def contradictions(self) -> Iterator[str]:
        """See `DecoderConfig.contradictions`."""
        yield from super().contradictions()  # type: ignore[misc]
        if self.attention_bias != self.mlp_bias:
            yield f"qkv_bias={self.attention_bias} and bias={self.mlp_bias} differ"


INTERNLM3 = LLAMA.but(
    "internlm3",
    "InternLM 3",
    "InternLM3ForCausalLM",
    "LlamaForCausalLM",
    config=(BiasesTogether, LLAMA.config),
    synonyms={"qkv_bias": "attention_bias", "bias": "mlp_bias"},
)

PANGUEMBEDDED = LLAMA.but(
    "PanguEmbedded",
    "openPangu Embedded 1B, 7B",
    "PanguEmbeddedForCausalLM",
    synonyms={"bias": "attention_bias"},
    # As `configuration_openpangu_dense.py` of the release has them.
    defaults={
        **{"vocab_size": 153376, "hidden_size": 4096, "intermediate_size": 12800, "num_hidden_layers": 34},
        **{"num_attention_heads": 32, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5},
        **{"attention_bias": True, "tie_word_embeddings": False},
    },
    default_rope={"rope_theta": 16000000.0},
)


@family_config
class MiniCpmFactors(DecoderConfig):
    """Factors by depth and width (arXiv:2404.06395, section 3). One that is null is 1."""

    scale_emb: float
    scale_depth: float | None
    dim_model_base: int | None

    @property
    def residual_factor(self) -> float:
        """The factor of what each part of a layer adds."""
        return 1.0 if self.scale_depth is None else self.scale_depth / self.num_hidden_layers**0.5

    @property
    def logit_factor(self) -> float:
        """The factor of logits."""
        return 1.0 if self.dim_model_base is None else self.dim_model_base / self.hidden_size


MINICPM = LLAMA.but(
    "minicpm",
    "MiniCPM 1B, 2B, MiniCPM 4 and 4.1",
    "MiniCPMForCausalLM",
    Attn(),
    Mlp(),
    Factors(embedding="scale_emb", residual="residual_factor", logits="logit_factor"),
    config=MiniCpmFactors,
    only={"num_experts": (0, None), **NO_BIAS},
    # As `configuration_minicpm.py` of openbmb/MiniCPM4-8B has them. Attention is dense for texts of all lengths, as
    # servers compute it: `sparse_config` selects keys for texts longer than its `dense_len`.
    defaults={
        **{"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32},
        **{"num_attention_heads": 32, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6},
        **{"tie_word_embeddings": True, "scale_emb": 1.0, "scale_depth": 1.0, "dim_model_base": 1},
    },
    left_out=frozenset({"mup_denominator", "sparse_config"}),
)

INTERNLM2_ROWS = (
    Map("attention_norm.weight", "attn_norm.scale", "D"),
    Map("attention.wqkv.weight", GPT_QKV, "(K (G + 1 + 1) H) D -> D (K G) H, D K H, D K H"),
    Map("attention.wo.weight", "attn.o.kernel", "D (N H) -> N H D"),
    Map("ffn_norm.weight", "mlp_norm.scale", "D"),
    Map("feed_forward.w1.weight", "mlp.gate.kernel", "F D -> D F"),
    Map("feed_forward.w3.weight", "mlp.up.kernel", "F D -> D F"),
    Map("feed_forward.w2.weight", "mlp.down.kernel", "D F -> F D"),
)

INTERNLM2 = LLAMA.but(
    "internlm2",
    "InternLM 2, 2.5",
    "InternLM2ForCausalLM",
    only={"bias": (False,), **NO_BIAS},
    default_rope={"rope_theta": 1000000.0},
    defaults={"vocab_size": 103168},
    table=MappingTable(
        (
            Map("model.tok_embeddings.weight", "embed.embedding", "V D"),
            *under("model.layers.{L}", "layers.{L}", *INTERNLM2_ROWS),
            Map("model.norm.weight", "norm.scale", "D"),
            Map("output.weight", "lm_head.kernel", "V D -> D V", when="has_lm_head"),
        ),
        copies={"output.weight": "model.tok_embeddings.weight"},
    ),
)

EMU3 = wrapper(
    "emu3",
    "Emu3, text",
    "Emu3ForConditionalGeneration",
    text=LLAMA,
    prefix="text_model.model.",
    head="text_model.lm_head.",
    outside={"vqmodel": "turns images to tokens and back: the text model alone is converted"},
    outside_keys=frozenset({"vq_config", "vocabulary_map"}),
)
