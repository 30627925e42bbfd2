"""The table of model families, and the choice of the family for a config.json. A family is imported when it is first
needed. Its config and table do not import jax.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from tpuconv.errors import ConfigError, UnsupportedConfig, UsageError
from tpuconv.jsonfile import short
from tpuconv.mapping.table import MappingTable
from tpuconv.models.common.config import ConfigReport, DecoderConfig, report_ignored
from tpuconv.models.common.config_keys import given_keys, without_keys
from tpuconv.models.common.heads import LOGITS, Head, headed, named_head, shown_head

FAMILIES: Mapping[str, str] = {
    "llama": "tpuconv.models.llama.family:FAMILY",
    "qwen2": "tpuconv.models.qwen2.family:FAMILY",
    "qwen3": "tpuconv.models.qwen3.family:FAMILY",
    "qwen3_moe": "tpuconv.models.qwen3_moe.family:FAMILY",
    "mixtral": "tpuconv.models.mixtral.family:FAMILY",
    "gpt_oss": "tpuconv.models.gpt_oss.family:FAMILY",
    "olmo2": "tpuconv.models.olmo2.family:FAMILY",
    "deepseek_v3": "tpuconv.models.deepseek_v3.family:FAMILY",
    "kimi_k2": "tpuconv.models.kimi_k2.family:FAMILY",
    "llama4": "tpuconv.models.llama4.family:FAMILY",
    "llama4_text": "tpuconv.models.llama4_text.family:FAMILY",
    "gemma": "tpuconv.models.gemma.family:FAMILY",
    "gemma2": "tpuconv.models.gemma2.family:FAMILY",
    "gemma3_text": "tpuconv.models.gemma3_text.family:FAMILY",
    "gemma3": "tpuconv.models.gemma3.family:FAMILY",
    "gemma4_text": "tpuconv.models.gemma4_text.family:FAMILY",
    "gemma4": "tpuconv.models.gemma4.family:FAMILY",
    "gemma4_unified": "tpuconv.models.gemma4_unified.family:FAMILY",
    "ministral3": "tpuconv.models.ministral3.family:FAMILY",
    "mistral3": "tpuconv.models.mistral3.family:FAMILY",
    "qwen2_5_vl": "tpuconv.models.qwen2_5_vl.family:FAMILY",
    "qwen3_vl": "tpuconv.models.qwen3_vl.family:FAMILY",
    "qwen3_vl_moe": "tpuconv.models.qwen3_vl_moe.family:FAMILY",
    "kimi_k25": "tpuconv.models.kimi_k25.family:FAMILY",
    "phi3": "tpuconv.models.phi3.family:FAMILY",
    "glm": "tpuconv.models.glm.family:FAMILY",
    "glm4": "tpuconv.models.glm4.family:FAMILY",
    "seed_oss": "tpuconv.models.seed_oss.family:FAMILY",
    "arcee": "tpuconv.models.arcee.family:FAMILY",
    "glm4_moe": "tpuconv.models.glm4_moe.family:FAMILY",
    "glm4_moe_lite": "tpuconv.models.glm4_moe_lite.family:FAMILY",
    "deepseek_v2": "tpuconv.models.deepseek_v2.family:FAMILY",
    "qwen2_moe": "tpuconv.models.qwen2_moe.family:FAMILY",
    "olmoe": "tpuconv.models.olmoe.family:FAMILY",
    "granite": "tpuconv.models.granite.family:FAMILY",
    "granitemoe": "tpuconv.models.granitemoe.family:FAMILY",
    "minimax_m2": "tpuconv.models.minimax_m2.family:FAMILY",
    "starcoder2": "tpuconv.models.starcoder2.family:FAMILY",
    "nemotron": "tpuconv.models.nemotron.family:FAMILY",
    "hunyuan_v1_dense": "tpuconv.models.hunyuan_v1_dense.family:FAMILY",
    "hunyuan_v1_moe": "tpuconv.models.hunyuan_v1_moe.family:FAMILY",
    "ernie4_5": "tpuconv.models.ernie4_5.family:FAMILY",
    "ernie4_5_moe": "tpuconv.models.ernie4_5_moe.family:FAMILY",
    "apertus": "tpuconv.models.apertus.family:FAMILY",
    "smollm3": "tpuconv.models.smollm3.family:FAMILY",
    "exaone4": "tpuconv.models.exaone4.family:FAMILY",
    "olmo3": "tpuconv.models.olmo3.family:FAMILY",
    "cohere2": "tpuconv.models.cohere2.family:FAMILY",
    "qwen3_next": "tpuconv.models.qwen3_next.family:FAMILY",
    "qwen3_5_text": "tpuconv.models.qwen3_5_text.family:FAMILY",
    "qwen3_5": "tpuconv.models.qwen3_5.family:FAMILY",
    "qwen3_5_moe_text": "tpuconv.models.qwen3_5_moe_text.family:FAMILY",
    "qwen3_5_moe": "tpuconv.models.qwen3_5_moe.family:FAMILY",
    "lfm2": "tpuconv.models.lfm2.family:FAMILY",
    "lfm2_moe": "tpuconv.models.lfm2_moe.family:FAMILY",
    "granitemoehybrid": "tpuconv.models.granitemoehybrid.family:FAMILY",
    "bamba": "tpuconv.models.bamba.family:FAMILY",
    "nemotron_h": "tpuconv.models.nemotron_h.family:FAMILY",
    "falcon_h1": "tpuconv.models.falcon_h1.family:FAMILY",
    "kimi_linear": "tpuconv.models.kimi_linear.family:FAMILY",
    "mistral4": "tpuconv.models.mistral4.family:FAMILY",
    "mistral_large4": "tpuconv.models.mistral_large4.family:FAMILY",
    "solar_open": "tpuconv.models.solar_open.family:FAMILY",
    "dots1": "tpuconv.models.dots1.family:FAMILY",
    "hy_v3": "tpuconv.models.hy_v3.family:FAMILY",
    "exaone_moe": "tpuconv.models.exaone_moe.family:FAMILY",
    "afmoe": "tpuconv.models.afmoe.family:FAMILY",
    "cohere2_moe": "tpuconv.models.cohere2_moe.family:FAMILY",
    "youtu": "tpuconv.models.youtu.family:FAMILY",
    "internlm3": "tpuconv.models.internlm3.family:FAMILY",
    "cohere": "tpuconv.models.cohere.family:FAMILY",
    "flex_olmo": "tpuconv.models.flex_olmo.family:FAMILY",
    "qwen2_vl": "tpuconv.models.qwen2_vl.family:FAMILY",
    "deepseek_v32": "tpuconv.models.deepseek_v32.family:FAMILY",
    "glm_moe_dsa": "tpuconv.models.glm_moe_dsa.family:FAMILY",
    "mimo_v2_flash": "tpuconv.models.mimo_v2_flash.family:FAMILY",
    "deepseek_v4": "tpuconv.models.deepseek_v4.family:FAMILY",
    "bailing_hybrid": "tpuconv.models.bailing_hybrid.family:FAMILY",
    "bailing_moe": "tpuconv.models.bailing_moe.family:FAMILY",
    "exaone": "tpuconv.models.exaone.family:FAMILY",
    "internlm2": "tpuconv.models.internlm2.family:FAMILY",
    "mimo": "tpuconv.models.mimo.family:FAMILY",
    "longcat_flash": "tpuconv.models.longcat_flash.family:FAMILY",
    "gpt_neox": "tpuconv.models.gpt_neox.family:FAMILY",
    "phi": "tpuconv.models.phi.family:FAMILY",
    "phimoe": "tpuconv.models.phimoe.family:FAMILY",
    "stablelm": "tpuconv.models.stablelm.family:FAMILY",
    "olmo": "tpuconv.models.olmo.family:FAMILY",
    "ministral": "tpuconv.models.ministral.family:FAMILY",
    "cwm": "tpuconv.models.cwm.family:FAMILY",
    "glm4v": "tpuconv.models.glm4v.family:FAMILY",
    "glm4v_moe": "tpuconv.models.glm4v_moe.family:FAMILY",
    "olmo_hybrid": "tpuconv.models.olmo_hybrid.family:FAMILY",
    "step3p5": "tpuconv.models.step3p5.family:FAMILY",
    "step3p7": "tpuconv.models.step3p7.family:FAMILY",
    "muse_glimmer": "tpuconv.models.muse_glimmer.family:FAMILY",
    "glm46v": "tpuconv.models.glm46v.family:FAMILY",
    "mellum": "tpuconv.models.mellum.family:FAMILY",
    "laguna": "tpuconv.models.laguna.family:FAMILY",
    "hy_v4": "tpuconv.models.hy_v4.family:FAMILY",
    "axk1": "tpuconv.models.axk1.family:FAMILY",
    "axk2": "tpuconv.models.axk2.family:FAMILY",
    "minicpm3": "tpuconv.models.minicpm3.family:FAMILY",
    "iquestcoder": "tpuconv.models.iquestcoder.family:FAMILY",
    "helium": "tpuconv.models.helium.family:FAMILY",
    "hyperclovax": "tpuconv.models.hyperclovax.family:FAMILY",
    "vaultgemma": "tpuconv.models.vaultgemma.family:FAMILY",
    "jais2": "tpuconv.models.jais2.family:FAMILY",
    "kolibri1": "tpuconv.models.kolibri1.family:FAMILY",
    "flint": "tpuconv.models.flint.family:FAMILY",
    "granite_swa": "tpuconv.models.granite_swa.family:FAMILY",
    "granitemoe_swa": "tpuconv.models.granitemoe_swa.family:FAMILY",
    "qwen2_5_omni": "tpuconv.models.qwen2_5_omni.family:FAMILY",
    "qwen3_omni_moe": "tpuconv.models.qwen3_omni_moe.family:FAMILY",
    "lfm3": "tpuconv.models.lfm3.family:FAMILY",
    "beam": "tpuconv.models.beam.family:FAMILY",
    "nanochat": "tpuconv.models.nanochat.family:FAMILY",
    "gptj": "tpuconv.models.gptj.family:FAMILY",
    "gpt2": "tpuconv.models.gpt2.family:FAMILY",
    "gpt_bigcode": "tpuconv.models.gpt_bigcode.family:FAMILY",
    "gpt_neo": "tpuconv.models.gpt_neo.family:FAMILY",
    "opt": "tpuconv.models.opt.family:FAMILY",
    "gemma4_unified_text": "tpuconv.models.gemma4_unified_text.family:FAMILY",
    "gemma3n_text": "tpuconv.models.gemma3n_text.family:FAMILY",
    "gemma3n": "tpuconv.models.gemma3n.family:FAMILY",
    "minimax_m3_vl": "tpuconv.models.minimax_m3_vl.family:FAMILY",
    "minimax_m3_vl_text": "tpuconv.models.minimax_m3_vl_text.family:FAMILY",
    "qwen4_exp_text": "tpuconv.models.qwen4_exp_text.family:FAMILY",
    "qwen4_exp": "tpuconv.models.qwen4_exp.family:FAMILY",
    "glm_ocr": "tpuconv.models.glm_ocr.family:FAMILY",
    "paddleocr_vl": "tpuconv.models.paddleocr_vl.family:FAMILY",
    "hunyuan_vl": "tpuconv.models.hunyuan_vl.family:FAMILY",
    "granite_docling": "tpuconv.models.granite_docling.family:FAMILY",
    "falcon": "tpuconv.models.falcon.family:FAMILY",
    "bitnet": "tpuconv.models.bitnet.family:FAMILY",
    "bloom": "tpuconv.models.bloom.family:FAMILY",
    "mpt": "tpuconv.models.mpt.family:FAMILY",
    "dbrx": "tpuconv.models.dbrx.family:FAMILY",
    "jetmoe": "tpuconv.models.jetmoe.family:FAMILY",
    "dots3_note_text": "tpuconv.models.dots3_note_text.family:FAMILY",
    "dots3_note": "tpuconv.models.dots3_note.family:FAMILY",
    "muse_spark": "tpuconv.models.muse_spark.family:FAMILY",
    "deepseek_ocr2": "tpuconv.models.deepseek_ocr2.family:FAMILY",
    "cosmos3_omni": "tpuconv.models.cosmos3_omni.family:FAMILY",
    "cosmos3_edge": "tpuconv.models.cosmos3_edge.family:FAMILY",
    "phi4_multimodal": "tpuconv.models.phi4_multimodal.family:FAMILY",
    "aria": "tpuconv.models.aria.family:FAMILY",
    "glm5_next": "tpuconv.models.glm5_next.family:FAMILY",
    "minimax": "tpuconv.models.minimax.family:FAMILY",
    "molmo2": "tpuconv.models.molmo2.family:FAMILY",
    "emu3": "tpuconv.models.emu3.family:FAMILY",
    "cohere_compass_text": "tpuconv.models.cohere_compass_text.family:FAMILY",
    "nemo_speechlm": "tpuconv.models.nemo_speechlm.family:FAMILY",
    "codegen": "tpuconv.models.codegen.family:FAMILY",
    "persimmon": "tpuconv.models.persimmon.family:FAMILY",
    "fuyu": "tpuconv.models.fuyu.family:FAMILY",
    "xglm": "tpuconv.models.xglm.family:FAMILY",
    "biogpt": "tpuconv.models.biogpt.family:FAMILY",
}
"""The families of this package. Other packages register a `Family` by an entry point in the group `GROUP`."""

WRAPPED = "tpuconv.models.wrappers:wrapped_family"
"""Finds the family of a text model inside one of many multimodal models."""

GROUP = "tpuconv.families"
"""The group of entry points for families."""


@dataclass(frozen=True)
class Family:
    """A model family.

    Attributes:
        name: its name.
        summary: the models that it supports, for `tpuconv families`.
        config: the class that reads config.json.
        table: the mapping of the tensors.
        model: the class of the Flax NNX model, as "module:Class".
        architectures: the model_type of each architecture in config.json that returns logits. The same models without
            a head for logits are read too (`tpuconv.models.common.heads`).
        variants: further tables, for releases in which tensors have other names.
        text_types: of a multimodal model the model_types of its text model, where families differ by it.
        text: of a multimodal model the family of its text model, if that has the same names of parameters and stands
            for it in the tables of targets.
    """

    name: str
    summary: str
    config: type[DecoderConfig]
    table: MappingTable
    model: str
    architectures: Mapping[str, str]
    variants: tuple[MappingTable, ...] = ()
    text_types: tuple[str, ...] = ()
    text: str = ""

    def returns(self, raw: Mapping[str, Any], tensors: Collection[str] = ()) -> str:
        """Returns what a model of this family returns (`tpuconv.models.common.heads`), by its parsed config.json and
        the names of its tensors."""
        names = [named_head(name, self.architectures) for name in raw.get("architectures") or ()]
        return shown_head(next(filter(None, names), LOGITS), tensors)

    def tables(self, returns: str = LOGITS) -> tuple[MappingTable, ...]:
        """Returns the tables of models that return this: that of most releases first."""
        return headed((self.table, *self.variants), returns)

    def table_for(self, names: Collection[str], returns: str = LOGITS) -> MappingTable:
        """Returns the table that most of the names of a checkpoint's tensors are in."""
        tables = self.tables(returns)
        return max(tables, key=lambda table: table.found(names)) if len(tables) > 1 else tables[0]

    def table_of(self, variant: str, returns: str = LOGITS) -> MappingTable:
        """Returns the table of a variant.

        Raises:
            UsageError: the family has no such variant.
        """
        for table in self.tables(returns):
            if table.variant == variant:
                return table
        raise UsageError(
            f"{self.name} has no variant {short(variant)}", hint="the checkpoint was made by another version of tpuconv"
        )

    def in_targets(self, model_type: str) -> tuple[str, str]:
        """Returns the family and the model type by which tables of targets have the models of a model type."""
        return (self.text, self.text_types[0]) if self.text else (self.name, model_type)

    @property
    def model_class(self) -> Any:
        """The class of the Flax NNX model; its arguments are those of `Decoder`. Imports jax."""
        return _resolve(self.model)

    def read_config(
        self,
        raw: Mapping[str, Any],
        allow: Collection[str] = (),
        tensors: Collection[str] = (),
        returns: str = LOGITS,
    ) -> DecoderConfig:
        """Returns the config that a parsed config.json describes without its keys `allow`. `tensors` are the names of
        the checkpoint's tensors or parameters, which may tell what config.json does not say; `returns` is what the
        model returns.

        Raises:
            UnsupportedConfig, ConfigError: see `DecoderConfig.from_hf` and `Head.from_hf`.
        """
        raw = without_keys(raw, allow)
        config = self.config.from_hf(self.config.settled(raw, tensors) if tensors else raw)
        return replace(config, head=Head.from_hf(returns, raw))

    def check_config(
        self,
        raw: Mapping[str, Any],
        allow: Collection[str] = (),
        tensors: Collection[str] = (),
        returns: str = LOGITS,
    ) -> ConfigReport:
        """Returns the config that a parsed config.json describes, and its keys that are not read.

        Args:
            raw: the parsed config.json.
            allow: keys that the user lets through; they are treated as absent.
            tensors: names of the checkpoint's tensors, which may show the value of an ignored or absent key.
            returns: what the model returns.

        Raises:
            UsageError: a key of `allow` is not in config.json, or the conversion reads it.
            UnsupportedConfig, ConfigError: see `read_config`.
        """
        given_keys(raw, allow)
        return report_ignored(self.read_config(raw, allow, tensors, returns), raw, allow, tensors)


def _resolve(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


@cache
def _plugins() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP) if point.name not in FAMILIES}


def family_names() -> list[str]:
    """Returns the names of all families, those of this package first."""
    return [*FAMILIES, *_plugins()]


def get_family(name: str) -> Family:
    """Returns the family of this name.

    Raises:
        UsageError: there is no such family, or its package cannot be imported.
    """
    if name in FAMILIES:
        family: Family = _resolve(FAMILIES[name])
        return family
    wrapper, _, text_type = name.partition(".")
    if text_type and (found := _wrapped({"model_type": wrapper, "text_config": {"model_type": text_type}})) is not None:
        return found
    if name not in _plugins():
        raise UsageError(f"there is no family '{name}'", hint=_suggestion(name, family_names()))
    point = _plugins()[name]
    try:
        plugin = point.load()
    except Exception as error:
        raise UsageError(f"the family '{name}' cannot be imported from {point.value}: {error!r}") from error
    if not isinstance(plugin, Family):
        raise UsageError(f"the family '{name}', {point.value}, is not a tpuconv.models.registry.Family")
    return plugin


def named_family(name: str) -> Family:
    """Returns the family of this name, or the one that reads this model type.

    Raises:
        UsageError: there is none, or its package cannot be imported.
    """
    return get_family(name) if name in FAMILIES else family_of_type(name) or get_family(name)


@cache
def family_of_type(model_type: str) -> Family | None:
    """Returns the family that reads a model type; None if there is none."""
    return next((family for family in all_families() if model_type in family.architectures.values()), None)


def all_families() -> list[Family]:
    """Returns all families that can be imported. Imports them."""
    return list(_imported([]))


def _imported(faults: list[str]) -> Iterator[Family]:
    """Yields the families, ours first, so that plugins are imported only if needed. One that cannot be imported is left
    out: `faults` takes the reason."""
    for name in family_names():
        try:
            family = get_family(name)
        except UsageError as error:
            faults.append(error.message)
        else:
            yield family


def _wrapped(hf_config: Mapping[str, Any]) -> Family | None:
    """Returns the family of the text model in one of `tpuconv.models.wrappers`; None of another config.json."""
    family: Family | None = _resolve(WRAPPED)(hf_config)
    return family


def find_family(hf_config: Mapping[str, Any]) -> Family:
    """Returns the family that supports the model_type and all architectures of a parsed config.json.

    Raises:
        ConfigError: the model_type or the architectures are malformed.
        UnsupportedConfig: no family supports them.
    """
    model_type, architectures = hf_config.get("model_type"), hf_config.get("architectures") or []
    names = [model_type, *architectures] if isinstance(architectures, list) else [None]
    if not isinstance(model_type, str) or not all(isinstance(name, str) for name in names):
        raise ConfigError(
            f"config.json: model_type={short(model_type)} and architectures={short(architectures)} name no model"
        )
    known: set[str] = set()
    faults: list[str] = []
    inside = _wrapped(hf_config)
    for family in _imported(faults) if inside is None else [inside]:
        known.update(family.architectures.values())
        if model_type in family.architectures.values() and _reads_text(family, hf_config):
            causal = [name for name, kind in family.architectures.items() if kind == model_type]
            other = [name for name in architectures if named_head(name, causal) is None]
            if not other:
                return family
            raise UnsupportedConfig(
                f"{family.name} reads model_type '{model_type}', but not its architecture "
                + ", ".join(name[:100] for name in other[:10]),
                hint=f"of this model_type it reads {', '.join(causal)}",
            )
    text = hf_config.get("text_config")
    around = f" with a text model {short(text.get('model_type'))}" if isinstance(text, Mapping) else ""
    raise UnsupportedConfig(
        f"no family reads model_type {short(model_type)}{around} (architectures {short(architectures)})",
        details=faults,
        hint=_suggestion(model_type, known) + "; `tpuconv families --new SRC` compares the model with each",
    )


def _reads_text(family: Family, hf_config: Mapping[str, Any]) -> bool:
    """Whether a family reads the text model of a multimodal one."""
    text = hf_config.get("text_config")
    kind = text.get("model_type") if isinstance(text, Mapping) else None
    return not family.text_types or kind is None or kind in family.text_types


def _suggestion(name: str, known: Collection[str]) -> str:
    near = get_close_matches(name, sorted(known), n=3)
    return (f"did you mean {' or '.join(near)}? " if near else "") + "`tpuconv families` lists all"
