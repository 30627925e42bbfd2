"""MiMo-7B: config and mapping table."""

from typing import ClassVar

from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.rows import FURTHER_TOKENS
from tpuconv.models.qwen2 import family as qwen2
from tpuconv.models.registry import family


@family_config
class Config(qwen2.Config):
    """The keys of config.json, with the defaults of Qwen2."""

    model_type: ClassVar[str] = "mimo"
    only: ClassVar = {"attention_bias": (True,)}
    left_out: ClassVar[frozenset[str]] = frozenset({"num_nextn_predict_layers"})


TABLE = qwen2.TABLE.renamed(str, ignore={"model.mtp_layers.*": FURTHER_TOKENS})

FAMILY = family(Config, TABLE, "MiMo-7B", "MiMoForCausalLM", model="qwen2")
