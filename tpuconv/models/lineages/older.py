"""GPT, CTRL, BLOOM, OPT, MPT and other families of their time."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from tpuconv.models.common.clipped import ClippedConfig
from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.config_keys import unnested
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.gpt import (
    FAIRSEQ_BIASES,
    FAIRSEQ_ROWS,
    GPT2_ATTENTION,
    GPT2_MLP,
    GPT_KEYS,
    GPT_QKV,
    GPT_QKV_BIAS,
    PositionedConfig,
    UnrotatedConfig,
    gpt_table,
    norm_rows,
    qkv_rows,
)
from tpuconv.models.common.rows import when
from tpuconv.models.common.sparse import ChosenExperts
from tpuconv.models.declare import decoder
from tpuconv.models.parts import Attn, Experts, Mlp, Norms
from tpuconv.notation.letters import Word, declare, with_letters
from tpuconv.notation.table import Map, MappingTable, under

OPENAI_GPT = decoder(
    "openai-gpt",
    "GPT, the first version",
    "OpenAIGPTLMHeadModel",
    Norms(kind="layer", module="modules.gpt:SumNormBlock"),
    Attn(True),
    Mlp("plain", "gelu_tanh", bias=True),
    base="modules.gpt:UnnormedPositionedDecoder",
    config=PositionedConfig,
    only={"afn": ("gelu",)},
    hf_names=GPT_KEYS,
    left_out=frozenset({"n_ctx"}),
    derived=PositionedConfig.derived | {"intermediate_size"},
    table=gpt_table(
        (*GPT2_ATTENTION, *norm_rows("ln_1", "attn_norm"), *GPT2_MLP, *norm_rows("ln_2", "mlp_norm")),
        others=(Map("positions_embed.weight", "positions.embedding", "positions D"),),
        embed="tokens_embed.weight",
        norm="",
    ),
)


@family_config
class CtrlConfig(UnrotatedConfig):
    """Sines and cosines of positions take half of the width each."""

    intermediate_size: int
    scale_embedding: ClassVar[bool] = True

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.hidden_size % 2:
            yield f"n_embd={self.hidden_size} is odd: sines and cosines of positions need pairs"

    @property
    def position_limit(self) -> int | None:
        return self.max_position_embeddings

    @property
    def has_logit_bias(self) -> bool:
        """True if the logits have a bias."""
        return not self.head.kind


CTRL = decoder(
    "ctrl",
    "CTRL",
    "CTRLLMHeadModel",
    Norms(kind="layer"),
    Attn(True),
    Mlp("plain", "relu", bias=True),
    base="modules.gpt:OpenSinusoidDecoder",
    config=CtrlConfig,
    only={"layer_norm_epsilon": (1e-6,)},  # which the norms of layers have, whatever it is
    hf_names={**GPT_KEYS, "intermediate_size": "dff"},
    left_out=frozenset({"n_ctx"}),
    table=gpt_table(
        (
            *norm_rows("layernorm1", "attn_norm"),
            *under(
                "multi_head_attention",
                "attn",
                Map("Wq.weight", "q.kernel", "(N H) D -> D N H"),
                Map("Wq.bias", "q.bias", "(N H) -> N H"),
                Map("Wk.weight", "k.kernel", "(K H) D -> D K H"),
                Map("Wk.bias", "k.bias", "(K H) -> K H"),
                Map("Wv.weight", "v.kernel", "(K H) D -> D K H"),
                Map("Wv.bias", "v.bias", "(K H) -> K H"),
                Map("dense.weight", "o.kernel", "D (N H) -> N H D"),
                Map("dense.bias", "o.bias", "D"),
            ),
            *norm_rows("layernorm2", "mlp_norm"),
            Map("ffn.0.weight", "mlp.up.kernel", "F D -> D F"),
            Map("ffn.0.bias", "mlp.up.bias", "F"),
            Map("ffn.2.weight", "mlp.down.kernel", "D F -> F D"),
            Map("ffn.2.bias", "mlp.down.bias", "D"),
        ),
        head=(Map("lm_head.bias", "logit_bias.bias", "V", when="has_logit_bias"),),
        embed="w.weight",
        norm="layernorm",
    ),
)

BLOOM = decoder(
    "bloom",
    "BLOOM, BLOOMZ",
    "BloomForCausalLM",
    Norms(kind="layer"),
    Attn(True, module="modules.gpt:AlibiAttention"),
    Mlp("plain", "gelu_tanh", bias=True),
    base="modules.gpt:NormedEmbeddings",
    config=UnrotatedConfig,
    defaults={"max_position_embeddings": 2048},
    only={"apply_residual_connection_post_layernorm": (False,)},
    hf_names={
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "rms_norm_eps": "layer_norm_epsilon",
    },
    aliases={"n_embed": "hidden_size", "seq_length": "max_position_embeddings"},
    left_out=frozenset(
        {
            *("attention_softmax_in_fp32", "bias_dropout_fusion", "masked_softmax_fusion", "offset_alibi"),
            *("skip_bias_add", "skip_bias_add_qkv", "slow_but_exact", "unk_token_id"),
        }
    ),
    derived=UnrotatedConfig.derived | {"intermediate_size"},
    table=gpt_table(
        (
            *norm_rows("input_layernorm", "attn_norm"),
            Map("self_attention.query_key_value.weight", GPT_QKV, "(N (H + H + H)) D -> D N H, D N H, D N H"),
            Map("self_attention.query_key_value.bias", GPT_QKV_BIAS, "(N (H + H + H)) -> N H, N H, N H"),
            Map("self_attention.dense.weight", "attn.o.kernel", "D (N H) -> N H D"),
            Map("self_attention.dense.bias", "attn.o.bias", "D"),
            *norm_rows("post_attention_layernorm", "mlp_norm"),
            Map("mlp.dense_h_to_4h.weight", "mlp.up.kernel", "F D -> D F"),
            Map("mlp.dense_h_to_4h.bias", "mlp.up.bias", "F"),
            Map("mlp.dense_4h_to_h.weight", "mlp.down.kernel", "D F -> F D"),
            Map("mlp.dense_4h_to_h.bias", "mlp.down.bias", "D"),
        ),
        others=norm_rows("word_embeddings_layernorm", "embed_norm"),
        masks="self_attention.",
        embed="word_embeddings.weight",
    ),
)


declare(
    token_width=Word("embeddings before they are projected", as_="D"),
)


@family_config
class OptConfig(PositionedConfig):
    """The vectors of the first two positions are not used."""

    intermediate_size: int
    word_embed_proj_dim: int | None
    activation_function: str
    do_layer_norm_before: bool
    remove_final_layer_norm: bool = False

    @property
    def sizes(self) -> dict[str, int]:
        return {**super().sizes, "token_width": self.word_embed_proj_dim or self.hidden_size}

    @property
    def outer_sizes(self) -> dict[str, int]:
        return with_letters(self.sizes, {"D": "token_width"})

    @property
    def projects_embeddings(self) -> bool:
        """True if embeddings have another width than layers."""
        return self.sizes["token_width"] != self.hidden_size

    @property
    def has_last_norm(self) -> bool:
        """True if a norm follows the last layer."""
        return self.do_layer_norm_before and not self.remove_final_layer_norm


OPT = decoder(
    "opt",
    "OPT",
    "OPTForCausalLM",
    Norms(kind="layer", module="modules.opt:ChosenNormBlock"),
    Attn("enable_bias"),
    Mlp("plain", bias="enable_bias", module="modules.gpt:ChosenMLP"),
    base="modules.opt:OptDecoder",
    config=OptConfig,
    only={"layer_norm_elementwise_affine": (True,), "activation_function": ("relu", "gelu")},
    hf_names={"intermediate_size": "ffn_dim", "remove_final_layer_norm": "_remove_final_layer_norm"},
    left_out=frozenset({"dropout", "init_std", "layerdrop"}),
    derived=PositionedConfig.derived | {"rms_norm_eps"},
    first_position=2,
    table=MappingTable(
        (
            *under(
                "model.decoder",
                "",
                Map("embed_tokens.weight", "embed.embedding", "V token_width"),
                *when(
                    "projects_embeddings",
                    Map("project_in.weight", "project_in.kernel", "D token_width -> token_width D"),
                    Map("project_out.weight", "norm.out.kernel", "token_width D -> D token_width"),
                ),
                Map("embed_positions.weight", "positions.embedding", "positions D"),
                *under("layers.{L}", "layers.{L}", *FAIRSEQ_ROWS, *when("enable_bias", *FAIRSEQ_BIASES)),
                *when("has_last_norm", *norm_rows("final_layer_norm", "norm")),
            ),
            Map("lm_head.weight", "lm_head.kernel", "V token_width -> token_width V", when="has_lm_head"),
        ),
        copies={"lm_head.weight": "model.decoder.embed_tokens.weight"},
    ),
)

XGLM = decoder(
    "xglm",
    "XGLM",
    "XGLMForCausalLM",
    Norms(kind="layer"),
    Attn(True),
    Mlp("plain", "gelu", bias=True),
    base="modules.gpt:SinusoidDecoder",
    config=UnrotatedConfig,
    keys={"intermediate_size": int, "scale_embedding": bool, "pad_token_id": int | None},
    defaults={"pad_token_id": 1},
    only={"activation_function": ("gelu",)},
    least={"pad_token_id": 0},
    most={"pad_token_id": 1},  # transformers has zeros at this position, less 2
    hf_names={
        "hidden_size": "d_model",
        "intermediate_size": "ffn_dim",
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "attention_heads",
    },
    left_out=frozenset({"dropout", "activation_dropout", "init_std", "layerdrop", "decoder_start_token_id"}),
    derived=UnrotatedConfig.derived | {"rms_norm_eps"},
    table=MappingTable(
        (
            Map("model.embed_tokens.weight", "embed.embedding", "V D"),
            *under("model.layers.{L}", "layers.{L}", *FAIRSEQ_ROWS, *FAIRSEQ_BIASES),
            *norm_rows("model.layer_norm", "norm"),
            Map("lm_head.weight", "lm_head.kernel", "V D -> D V", when="has_lm_head"),
        ),
        ignore={"model.embed_positions.weights": "computed from config.json"},
        copies={"lm_head.weight": "model.embed_tokens.weight"},
    ),
)

BIOGPT = decoder(
    "biogpt",
    "BioGPT",
    "BioGptForCausalLM",
    Norms(kind="layer"),
    Attn(True),
    Mlp("plain", "gelu", bias=True),
    base="modules.gpt:ScaledPositionedDecoder",
    config=PositionedConfig,
    keys={"intermediate_size": int, "scale_embedding": bool},
    only={"hidden_act": ("gelu",)},
    left_out=frozenset(
        {
            *("hidden_dropout_prob", "attention_probs_dropout_prob", "activation_dropout", "layerdrop"),
            "layer_norm_eps",
        }
    ),
    derived=PositionedConfig.derived | {"rms_norm_eps"},
    first_position=2,
    table=MappingTable(
        (
            Map("biogpt.embed_tokens.weight", "embed.embedding", "V D"),
            Map("biogpt.embed_positions.weight", "positions.embedding", "positions D"),
            *under("biogpt.layers.{L}", "layers.{L}", *FAIRSEQ_ROWS, *FAIRSEQ_BIASES),
            *norm_rows("biogpt.layer_norm", "norm"),
            Map("output_projection.weight", "lm_head.kernel", "V D -> D V", when="has_lm_head"),
        ),
        copies={"output_projection.weight": "biogpt.embed_tokens.weight"},
    ),
)


@family_config
class MptConfig(ClippedConfig, UnrotatedConfig):
    """The keys of config.json, and of `attn_config` in it."""

    softmax_scale: float | None = None

    @classmethod
    def in_our_keys(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        return super().in_our_keys(unnested(raw, "attn_config"))


MPT = decoder(
    "mpt",
    "MPT 7B, 30B",
    "MptForCausalLM",
    "MPTForCausalLM",
    Norms(kind="layer without bias"),
    Attn(scale="softmax_scale", module="modules.gpt:ClippedAlibiAttention", keys=("clip_qkv",)),
    Mlp("plain", "gelu"),
    config=MptConfig,
    defaults={"clip_qkv": None, "softmax_scale": None},
    only={
        "alibi": (True,),
        "alibi_bias_max": (8,),  # transformers 5.23 computes with 8 whatever it is
        "attn_type": ("multihead_attention",),
        "attn_uses_sequence_id": (False,),
        "expansion_ratio": (4,),
        "logit_scale": (None,),
        "no_bias": (True,),
        "norm_type": ("low_precision_layernorm", "layernorm"),
        "prefix_lm": (False,),
        "qk_ln": (False,),
    },
    hf_names={
        "hidden_size": "d_model",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "max_position_embeddings": "max_seq_len",
        "rms_norm_eps": "layer_norm_epsilon",
    },
    synonyms={"max_position_embeddings": "max_seq_len"},
    left_out=frozenset(
        {
            *("attn_impl", "emb_pdrop", "embedding_fraction", "init_config", "init_device"),
            *("tokenizer_name", "verbose"),
            "learned_pos_emb",  # which models with ALiBi do not have, whatever it says
        }
    ),
    derived=UnrotatedConfig.derived | {"intermediate_size"},
    table=MappingTable(
        (
            Map("transformer.wte.weight", "embed.embedding", "V D"),
            *under(
                "transformer.blocks.{L}",
                "layers.{L}",
                Map("norm_1.weight", "attn_norm.scale", "D"),
                *qkv_rows("attn.Wqkv"),
                Map("attn.out_proj.weight", "attn.o.kernel", "D (N H) -> N H D"),
                Map("norm_2.weight", "mlp_norm.scale", "D"),
                Map("ffn.up_proj.weight", "mlp.up.kernel", "F D -> D F"),
                Map("ffn.down_proj.weight", "mlp.down.kernel", "D F -> F D"),
            ),
            Map("transformer.norm_f.weight", "norm.scale", "D"),
            Map("lm_head.weight", "lm_head.kernel", "V D -> D V", when="has_lm_head"),
        ),
        copies={"lm_head.weight": "transformer.wte.weight"},
    ),
)


class DbrxConfig(ClippedConfig, ChosenExperts, DecoderConfig):
    """The keys of config.json, and of `attn_config` and `ffn_config` in it. `intermediate_size` is the width of one
    expert."""

    @classmethod
    def in_our_keys(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        return super().in_our_keys(unnested(raw, "attn_config", "ffn_config"))


DBRX = decoder(
    "dbrx",
    "DBRX",
    "DbrxForCausalLM",
    Norms(kind="layer without bias"),
    Attn(module="common.blocks:ClippedAttention", keys=("clip_qkv",)),
    Experts(module="modules.experts:NormalizedExperts", keys=("num_experts", "num_experts_per_tok")),
    config=DbrxConfig,
    defaults={
        "intermediate_size": 3584,
        "num_key_value_heads": 1,
        "head_dim": None,
        "num_experts": 4,
        "num_experts_per_tok": 1,
        "rms_norm_eps": 1e-05,
        "clip_qkv": None,
    },
    only={
        "ffn_act_fn": ({"name": "silu"}, None),
        "moe_normalize_expert_weights": (1.0,),
        "tie_word_embeddings": (False,),
    },
    hf_names={
        "hidden_size": "d_model",
        "intermediate_size": "ffn_hidden_size",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "num_key_value_heads": "kv_n_heads",
        "num_experts": "moe_num_experts",
        "num_experts_per_tok": "moe_top_k",
        "max_position_embeddings": "max_seq_len",
    },
    synonyms={"hidden_size": "d_model", "num_key_value_heads": "kv_n_heads"},  # copies, which transformers writes
    left_out=frozenset({"emb_pdrop", "moe_jitter_eps", "moe_loss_weight"}),
    derived=DecoderConfig.derived | {"head_dim", "rms_norm_eps"},
    table=MappingTable(
        (
            Map("transformer.wte.weight", "embed.embedding", "V D"),
            *under(
                "transformer.blocks.{L}",
                "layers.{L}",
                Map("norm_attn_norm.norm_1.weight", "attn_norm.scale", "D"),
                *qkv_rows("norm_attn_norm.attn.Wqkv"),
                Map("norm_attn_norm.attn.out_proj.weight", "attn.o.kernel", "D (N H) -> N H D"),
                Map("norm_attn_norm.norm_2.weight", "mlp_norm.scale", "D"),
                Map("ffn.router.layer.weight", "moe.router.kernel", "E D -> D E"),
                Map("ffn.experts.mlp.w1", "moe.gate.kernel", "(E M) D -> E D M"),
                Map("ffn.experts.mlp.v1", "moe.up.kernel", "(E M) D -> E D M"),
                Map("ffn.experts.mlp.w2", "moe.down.kernel", "(E M) D -> E M D"),
            ),
            Map("transformer.norm_f.weight", "norm.scale", "D"),
            Map("lm_head.weight", "lm_head.kernel", "V D -> D V", when="has_lm_head"),
        ),
    ),
)
