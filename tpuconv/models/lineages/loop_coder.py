"""Models whose layers run several times: IQuest Coder Loop, Nanbeige 4.2, Ouro."""

from collections.abc import Mapping
from typing import Any, ClassVar

from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.looped import LoopedConfig
from tpuconv.models.declare import decoder
from tpuconv.models.lineages.llama import NO_BIAS
from tpuconv.models.parts import Attn, Mlp, Norms
from tpuconv.notation.letters import Word, declare
from tpuconv.notation.table import Map

declare(exits=Word("gates that end the runs of a token"))


@family_config
class LoopCoderConfig(LoopedConfig, DecoderConfig):
    """All layers run `loop_num` times. From the second time on, a token sees the keys and values of the first time, and
    the ones of this time in a window of `loop_window_size` tokens, itself included."""

    only: ClassVar = NO_BIAS
    default_rope: ClassVar[Mapping[str, Any]] = {"rope_theta": 500000.0}

    loop_num: int = 2
    loop_window_size: int = 64

    @property
    def executed_layers(self) -> tuple[int, ...]:
        return tuple(range(self.num_hidden_layers)) * self.loop_num

    @property
    def horizons(self) -> frozenset[int]:
        return super().horizons | ({self.loop_window_size} if self.loop_num > 1 else set())


IQUESTLOOPCODER = decoder(
    "iquestloopcoder",
    "IQuest Coder Loop",
    "IQuestLoopCoderForCausalLM",
    Norms(),
    Attn(module="modules.loop_coder:MixingAttention"),
    Mlp(),
    base="modules.loop_coder:LoopCoder",
    config=LoopCoderConfig,
    others=(
        Map("model.gate_projections.{L}.weight", "layers.{L}.attn.gate.query", "N H"),
        Map("model.gate_projections.{L}.bias", "layers.{L}.attn.gate.bias", "N"),
    ),
    # As `configuration_iquestloopcoder.py` of the release has them.
    defaults={
        **{"vocab_size": 76800, "hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 80},
        **{"num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 8192},
        **{"rms_norm_eps": 1e-5, "tie_word_embeddings": False},
    },
)


@family_config
class NanbeigeConfig(LoopedConfig, DecoderConfig):
    """All layers run `num_loops` times, and the last norm of the model each time behind them. What else the code of the
    release can do, no release does."""

    only: ClassVar[Mapping[str, Any]] = NO_BIAS | {
        "skip_loop_final_norm": (False,),
        "loop_loss_weights": ([], None),
        **dict.fromkeys(("qk_layernorm", "enable_hyper_connection", "enable_mhc", "enable_depth_attention"), (False,)),
        "enable_double_loop_split": (False,),
    }
    left_out: ClassVar[frozenset[str]] = frozenset({"kv_channels"})
    default_rope: ClassVar[Mapping[str, Any]] = {"rope_theta": 70000000.0}

    num_loops: int = 2

    @property
    def executed_layers(self) -> tuple[int, ...]:
        return tuple(range(self.num_hidden_layers)) * self.num_loops


NANBEIGE = decoder(
    "nanbeige",
    "Nanbeige 4.2 3B",
    "NanbeigeForCausalLM",
    Norms(),
    Attn(),
    Mlp(),
    base="modules.loop_coder:NormedLoops",
    config=NanbeigeConfig,
    # As Nanbeige/Nanbeige4.2-3B has them.
    defaults={
        **{"vocab_size": 166144, "hidden_size": 3072, "intermediate_size": 10752, "num_hidden_layers": 22},
        **{"num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 262144},
        **{"rms_norm_eps": 1e-5, "tie_word_embeddings": False},
    },
)


@family_config
class OuroConfig(LoopedConfig, DecoderConfig):
    """All layers run `total_ut_steps` times, and the last norm of the model each time behind them. A token whose gate
    says so may leave before the last run: with the threshold 1 of the releases none does, and the gate is kept."""

    only: ClassVar[Mapping[str, Any]] = NO_BIAS | {
        "early_exit_threshold": (1.0, None),
        "use_sliding_window": (False,),
    }
    left_out: ClassVar[frozenset[str]] = frozenset({"max_window_layers", "sliding_window", "layer_types"})
    default_rope: ClassVar[Mapping[str, Any]] = {"rope_theta": 1000000.0}

    total_ut_steps: int = 4

    @property
    def executed_layers(self) -> tuple[int, ...]:
        return tuple(range(self.num_hidden_layers)) * self.total_ut_steps

    @property
    def sizes(self) -> dict[str, int]:
        return {**super().sizes, "exits": 1}


OURO = NANBEIGE.but(
    "ouro",
    "Ouro 1.4B, 2.6B",
    "OuroForCausalLM",
    Norms(
        "sandwich",
        names=(
            *("input_layernorm", "input_layernorm_2"),
            *("post_attention_layernorm", "post_attention_layernorm_2"),
        ),
    ),
    base="modules.loop_coder:GatedLoops",
    config=OuroConfig,
    others=(
        Map("model.early_exit_gate.weight", "exit_gate.kernel", "exits D -> D exits"),
        Map("model.early_exit_gate.bias", "exit_gate.bias", "exits"),
    ),
    # As ByteDance/Ouro-1.4B has them.
    defaults={
        **{"vocab_size": 49152, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24},
        **{"num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 128, "max_position_embeddings": 65536},
        **{"rms_norm_eps": 1e-6, "tie_word_embeddings": False},
    },
)
