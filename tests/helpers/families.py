"""Tiny models of every family, in shapes that real ones have and in some that show mistakes sooner.

Every parametrised test of the models and of the conversion runs over `CASES`, which `tests/data/cases/` describes.
transformers is imported when it is needed.
"""

import json
import re
import warnings
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import yaml
from yaml.composer import ComposerError

from tpuconv.models.registry import Family, get_family
from tpuconv.verify.reference_calls import attention_of, mended
from tpuconv.verify.reference_types import READ_WITHIN, whole_config

FOLDER = Path(__file__).parent.parent / "data" / "cases"


@dataclass(frozen=True)
class Traits:
    """A family as its file in `tests/data/cases/` describes it: the configs of its cases by their names, and how the
    tests treat it."""

    cases: Mapping[str, Mapping[str, Any]]
    read_as: str = ""
    """For a family that transformers does not have: the type of a model that computes the same."""
    model_type: str = ""
    """The model_type of transformers' config. Default: `read_as`, or the name of the family."""
    model_types: Mapping[str, str] = field(default_factory=dict)
    """The same for single cases."""
    computed_by: str = ""
    """The family whose modules it runs, if it has only a config or names of its own. Default: `read_as`."""
    no_scan: str = ""
    """The reason why layers cannot be scanned."""
    repeating: Sequence[str] = ()
    """Cases of a family with `no_scan` whose layers are alike, or repeat with a period."""
    own_cache: bool = False
    """Has a cache of its own; the other families have llama's."""
    centered: bool = False
    """Norms multiply by 1 + w."""
    inseparable: bool = False
    """No layer can run by itself on hidden states."""
    looped: bool = False
    """Weights of layers are used several times, or layers read what entered earlier ones: none runs by itself."""
    vision_config: Mapping[str, Any] | None = None
    """For a text model inside a multimodal model: sizes of the vision tower."""
    beside_text: Mapping[str, Any] = field(default_factory=dict)
    """Further keys beside `text_config` and `vision_config`."""
    as_wide_as_text: Sequence[str] = ("out_hidden_size",)
    """Keys of the towers that have to be the text model's `hidden_size`."""
    thinker_of: str = ""
    """The class in transformers of the whole model, if the part that returns logits is its `thinker`."""
    renamed_by_transformers: bool = False
    """transformers 5.24 saves tensors under other names than those of releases, or more of them."""
    recut_by_transformers: bool = False
    """transformers 5.24 saves tensors that are cut at other rows than those of releases."""
    released_tensors: Mapping[str, str] = field(default_factory=dict)
    """Parts of the names that transformers gives tensors, and those of releases, in the order in which they are
    replaced. `self_attn.qkv.` is one matrix in place of three."""
    released_keys: Mapping[str, str] = field(default_factory=dict)
    """The same for keys of config.json. One without a name there is left out."""
    released_beside: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of config.json in releases; architectures without their ends, such as `ForCausalLM`."""


class _Loader(yaml.SafeLoader):
    """Reads a file that may name the pieces of `shared.yaml`; 1e-3 is a number, as in YAML 1.2."""

    def __init__(self, path: Path, pieces: Mapping[str, yaml.Node]) -> None:
        super().__init__(path.read_text())
        self.name = str(path)  # in errors
        self.anchors = dict(pieces)

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        twice = [key for key, count in Counter(key.value for key, _ in node.value).items() if count > 1]
        if twice:
            raise ComposerError(None, None, f"{twice[0]} is there twice", node.start_mark)
        return node


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?e[-+]?\d+$"), list("-+0123456789")
)


def read(folder: Path) -> tuple[dict[str, Any], dict[str, Traits]]:
    """The pieces of `shared.yaml` in a folder, and the families of its files."""
    shared, families = folder / "shared.yaml", {}
    pieces = {key.value: node for key, node in _Loader(shared, {}).get_single_node().value}
    for path in sorted(set(folder.glob("*.yaml")) - {shared}):
        data = _Loader(path, pieces).get_single_data()
        data.pop("pieces", None)
        if twice := data.keys() & families.keys():
            raise ValueError(f"{path}: {', '.join(twice)} is in another file too")
        for name, traits in data.items():
            try:
                family = families[name] = Traits(**traits)
            except TypeError as error:
                raise ValueError(f"{path}: {name}: {error}") from error
            if unknown := {*family.repeating, *family.model_types} - family.cases.keys():
                raise ValueError(f"{path}: {name} has no case {', '.join(unknown)}")
    return _Loader(shared, {}).get_single_data(), families


@dataclass(frozen=True)
class Case:
    """One tiny model: `id` names it in test ids, `model_type` and `config` make its transformers config. `no_scan` says
    why its layers cannot be scanned; `written_as` is the model_type on disk of a family that transformers reads as
    another."""

    id: str
    family: str
    model_type: str
    config: Mapping[str, Any] = field(hash=False)
    no_scan: str = ""
    written_as: str = ""

    @property
    def key(self) -> str:
        """A name for a file: cases of other sizes may have the same id."""
        return f"{self.id}-{crc32(repr(sorted(self.config.items())).encode()):08x}"

    @property
    def traits(self) -> Traits:
        return TRAITS[self.family]

    def hf_config(self) -> Any:
        from transformers import AutoConfig

        from helpers.released_code import config_of

        sizes = deepcopy(SIZES | dict(self.config))  # transformers writes into them
        if self.traits.vision_config is None:
            return config_of(self.model_type, **sizes)
        tied = sizes.get("tie_word_embeddings", False)
        vision, beside = deepcopy((dict(self.traits.vision_config), dict(self.traits.beside_text)))
        for part in (vision, *(value for value in beside.values() if isinstance(value, dict))):
            part |= {key: sizes["hidden_size"] for key in self.traits.as_wide_as_text if key in part}
        if self.traits.thinker_of:
            thinker = {"text_config": sizes, "vision_config": vision, "tie_word_embeddings": tied} | beside
            return AutoConfig.for_model(self.model_type, thinker_config=thinker, enable_audio_output=False)
        if self.family == "gemma3n":  # for whose own tower transformers needs timm
            config = AutoConfig.for_model("gemma3n", text_config=sizes, tie_word_embeddings=tied, **beside)
            vars(config)["vision_config"] = AutoConfig.for_model("siglip_vision_model", **vision)
            return config
        return config_of(self.model_type, text_config=sizes, vision_config=vision, tie_word_embeddings=tied, **beside)

    def __str__(self) -> str:
        return self.id


def _cases(family: str, traits: Traits) -> Iterator[Case]:
    for name, config in traits.cases.items():
        yield Case(
            f"{family}-{name}",
            family,
            traits.model_types.get(name) or traits.model_type or traits.read_as or family,
            config,
            "" if name in traits.repeating else traits.no_scan,
            family if traits.read_as else "",
        )


PIECES, TRAITS = read(FOLDER)
SIZES, LLAMA3, LINEAR, YARN, LONGROPE = (PIECES[name] for name in ("SIZES", "LLAMA3", "LINEAR", "YARN", "LONGROPE"))
CASES = [case for family, traits in TRAITS.items() for case in _cases(family, traits)]


FIRST = {case.family: case for case in reversed(CASES)}
"""The first case of each family."""
BY_ID = {case.id: case for case in CASES}
FAMILIES = set(TRAITS)
VISION = [name for name, traits in TRAITS.items() if traits.vision_config is not None]
"""Text models inside multimodal models."""
OWN_CACHE = {name for name, traits in TRAITS.items() if traits.own_cache}
STATES_ALONE = {"mamba2", "mamba", "falcon_mamba"}
"""Families with a state in every layer, and neither attention nor MLPs."""
CORE = {
    *("llama", "qwen2", "qwen3", "qwen3_moe", "mixtral", "gpt_oss", "olmo2", "deepseek_v3", "kimi_k2"),
    *("llama4", "llama4_text"),
}
"""Families whose cases run in the fast tests. Between them they have every part of the converter."""

FAST = {
    "test_every_parameter_is_one_target_of_the_table",
    "test_every_tensor_is_one_source_of_the_table",
    "test_logits_of_a_sequence",
    "test_what_transformers_saves_under_names_of_its_own_is_read",
}
"""The tests that are fast for the first case of every other family; all else of those families is slow."""

ONCE = {"test_every_parameter_is_one_target_of_the_table"}
"""Those of them that are fast for no other case of the families above either: a model is traced for each."""


def is_slow(test: str, parameters: Mapping[str, Any]) -> bool:
    """Whether a test, by the name of its function, is slow because of the case among its parameters."""
    case = next((value for value in parameters.values() if isinstance(value, Case)), None)
    if case is None or (case.family in CORE and test not in ONCE):
        return False
    return test not in FAST or case != FIRST[case.family] or parameters.get("scan", False)


def families_of(parameters: Mapping[str, Any]) -> set[str]:
    """The families among the parameters of a test: of cases, and by name; other texts too."""
    values = parameters.values()
    return {
        value.family if isinstance(value, Case) else value.name if isinstance(value, Family) else value
        for value in values
        if isinstance(value, Case | Family | str)
    }


def is_inseparable(case: Case) -> bool:
    """Whether no layer of a case can run by itself on hidden states."""
    keys = ("hidden_size_per_layer_input", "num_kv_shared_layers", "ple_layer_ids")
    return case.traits.inseparable or case.traits.looped or any(case.config.get(key) for key in keys)


WITH_MODULES = {name for name, traits in TRAITS.items() if not (traits.computed_by or traits.read_as)}
"""Families that do not run another one's modules."""


def one_fast_of_each(families: Collection[str] = WITH_MODULES, cases: Sequence[Case] = CASES) -> list[Any]:
    """All cases for `parametrize`, those marked slow that are not the first of these families: by default of all that
    have modules of their own."""
    import pytest

    first = {case.family: case for case in reversed(cases) if case.family in families}
    return [
        pytest.param(case, id=str(case), marks=[] if case is first.get(case.family) else [pytest.mark.slow])
        for case in cases
    ]


LABELS = 3
"""Of the models that return scores."""


def uniform_bounds(family: str, name: str) -> tuple[float, float] | None:
    """The bounds of the random values of a parameter that is alike, or too small to matter, when new; None of
    others."""
    if family in ("hy_v4", "hy_v4_vl") and name.endswith(("_hc.scale", ".hc_scale")):
        return 0.5, 1.5  # the streams would be alike
    if family == "glm5_next" and name.endswith(("_hc.scale", ".hc_scale")):
        return 2.5, 7.5  # the matrices beside them would be alike
    if name.endswith("A_log"):
        return -4, -1  # else sums of rates are so large that float32 loses their differences
    if ".alpha_" in name or name.endswith((".D", ".query", ".static_weight")):
        return -1, 1
    if name.endswith(".global_scale") or (family == "dory" and ".suv_" in name):
        return 0.5, 1.5
    if family == "dory" and name.endswith((".sqk", ".s_gate", ".lambda_1", ".lambda_2")):
        return 0.1, 0.4
    if family == "zaya" and name.endswith(("_scale", ".temp")):
        return 0.5, 1.5
    if name.endswith(".z_L_init"):
        return -1, 1
    if family == "dory" and name.endswith(".logit_scale"):
        return 1, 4
    return None


def hf_model(case: Case, seed: int = 0, returns: str = "") -> Any:
    """The transformers model in float32 with random weights; of hidden states or scores if it `returns` these. Norms
    and biases are random too: as ones and zeros, which they are when new, they would hide that they are used wrongly
    or not at all."""
    import torch
    import transformers
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        AutoModel,
        AutoModelForCausalLM,
        AutoModelForMultimodalLM,
        AutoModelForSequenceClassification,
        AutoModelForTokenClassification,
    )

    from helpers.released_code import class_of

    torch.manual_seed(seed)
    # The text model alone would be saved under other names than those of the released checkpoints.
    is_inside = case.traits.vision_config is not None or case.family in READ_WITHIN
    language_model = AutoModelForMultimodalLM if is_inside else AutoModelForCausalLM
    classifiers = {"scores": AutoModelForSequenceClassification, "scores of tokens": AutoModelForTokenClassification}
    headless = {**classifiers, "hidden states": AutoModel}
    auto = headless.get(returns, language_model).from_config
    if case.traits.thinker_of:
        config = case.hf_config().thinker_config
    else:
        config = whole_config(case.hf_config().to_dict()) if case.family in READ_WITHIN else case.hf_config()
    kind = class_of(case.model_type)
    if not (kind or is_inside or type(config) in MODEL_FOR_CAUSAL_LM_MAPPING):  # Mistral 4's
        kind = getattr(transformers, next(iter(get_family(case.family).architectures)))
    if kind is not None and not returns:
        auto = kind._from_config
    if returns in classifiers:
        config.num_labels = LABELS
    with warnings.catch_warnings():  # of no shared expert a matrix without elements is made
        warnings.filterwarnings("ignore", "Initializing zero-element tensors")
        model = mended(auto(config, attn_implementation=attention_of(config), dtype=torch.float32)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            part = name.replace("norm_attn_norm", "")  # of which DBRX's attention is a part
            if "norm" in part or name.endswith(("router.scale", "per_expert_scale", "output_scale")):
                parameter.uniform_(0.5, 1.5)
                if case.traits.centered and "linear_attn" not in name:
                    parameter -= 1
            elif name.endswith((".bias", "_bias", ".sinks", "_hc.base", ".hc_base", "softmax_scaling.scale")):
                parameter.normal_(0, 0.3)
            elif bounds := uniform_bounds(case.family, name):
                parameter.uniform_(*bounds)
            elif "ple.conv1d" in name or "index_kpool_compress" in name:
                parameter.normal_(0, 0.3)  # zero or one when new
            elif "embed_tokens" in name or "modality_router" in name:
                # The padding token's too, which is zero when new; and of inputs that are divided by the width.
                parameter.normal_(0, 0.25 if "embed" in name else 5)
        for name, buffer in model.named_buffers():
            if "e_score_correction_bias" in name or name.endswith(
                ("expert_bias", "balancing_biases", "rotary_emb.alpha")
            ):
                buffer.normal_(0, 0.2)
            elif name.endswith("tid2eid"):
                scores = torch.rand(len(buffer), case.config["n_routed_experts"])
                buffer.copy_(scores.topk(buffer.shape[1]).indices)  # no expert twice, as in the releases
            elif "layer_scalar" in name:
                buffer.uniform_(0.5, 1.5)
    return model


def _drop_empty(path: Path) -> None:
    from safetensors.torch import load_file, save_file

    save_file({name: x for name, x in load_file(path).items() if x.numel()}, path, {"format": "pt"})


def _drop(path: Path, experts: range) -> None:
    from safetensors.torch import load_file, save_file

    kept = {
        name: x
        for name, x in load_file(path).items()
        if int(name.partition("experts.")[2].partition(".")[0] or -1) not in experts
    }
    save_file(kept, path, {"format": "pt"})


def _as_blocks(path: Path) -> None:
    from safetensors.torch import load_file, save_file

    def released(name: str) -> str:
        if not (found := re.match(r"backbone\.layers\.(\d+)\.(self_attn|mlp|lambda_1|lambda_2)(.*)", name)):
            return name
        number, part, rest = found.groups()
        name = {"lambda_1": "attn_alpha", "lambda_2": "mlp_alpha"}.get(part, "mixer")
        return f"backbone.layers.{2 * int(number) + (part in ('mlp', 'lambda_2'))}.{name}{rest}"

    save_file({released(name): x for name, x in load_file(path).items()}, path, {"format": "pt"})


def _resplit(path: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(path)
    for name in [name for name in tensors if "q_conv1d" in name]:
        names = [name.replace("q_conv1d", f"{x}_conv1d") for x in "qkv"]
        widths = [len(tensors[each.replace("_conv1d", "_proj")]) for each in names]
        parts = torch.cat([tensors[each] for each in names]).split(widths)
        tensors |= {each: part.clone() for each, part in zip(names, parts, strict=True)}
    for name in [name for name in tensors if "self_attn.q_proj" in name]:  # whose norms it renames too
        front = name.partition("self_attn.")[0]
        tensors[f"{front}post_attention_layernorm.weight"] = tensors.pop(f"{front}feedforward_layer_norm.weight")
    save_file(tensors, path, {"format": "pt"})


def _unwrap(folder: Path, architecture: str) -> None:
    from safetensors.torch import load_file, save_file

    path, raw = folder / "model.safetensors", json.loads((folder / "config.json").read_text())
    kept = {name: x for name, x in load_file(path).items() if not name.startswith("vi")}
    save_file(kept, path, {"format": "pt"})
    text = raw["text_config"] | {key: raw[key] for key in ("transformers_version", "tie_word_embeddings")}
    (folder / "config.json").write_text(json.dumps(text | {"architectures": [architecture]}))


def resplit_embedding(path: Path, vocabulary: int) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(path)
    names = sorted(name for name in tensors if ".wte." in name)  # that of added tokens last
    rows = torch.cat([tensors[name] for name in names])
    parts = rows[:vocabulary], rows[vocabulary:]
    save_file(tensors | {name: x.clone() for name, x in zip(names, parts, strict=True)}, path, {"format": "pt"})


def _rename(folder: Path, names: Mapping[str, str]) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    path, raw = folder / "model.safetensors", json.loads((folder / "config.json").read_text())
    tensors = load_file(path)
    for name in [name for name in tensors if "self_attn.q_proj." in name and "self_attn.qkv." in names]:
        parts = [tensors.pop(name.replace("q_proj", f"{x}_proj")) for x in "qkv"]
        if raw["model_type"] in ("llama", "mimo_v2_flash"):  # the queries of a group of heads, its keys, its values
            groups = raw["num_key_value_heads"]
            joined = torch.cat([x.reshape(groups, -1, x.shape[-1]) for x in parts], 1).reshape(-1, parts[0].shape[-1])
        else:
            joined = torch.cat(parts)
        tensors[name.replace("q_proj", "qkv")] = joined
    tensors = {reduce(lambda text, pair: text.replace(*pair), names.items(), name): x for name, x in tensors.items()}
    save_file(tensors, path, {"format": "pt"})


def _in_released_keys(case: Case, raw: dict[str, Any]) -> dict[str, Any]:
    """A config.json of transformers in the keys of the release."""
    if beside := case.traits.released_beside:
        head = re.search("For[A-Z].*|Model$", raw["architectures"][0])
        raw = {name: x for key, x in raw.items() if (name := case.traits.released_keys.get(key, key))} | dict(beside)
        raw["architectures"] = [name + (head[0] if head else "") for name in raw["architectures"]]
    return raw | ({"model_type": case.written_as} if case.written_as else {})


def released_config(case: Case) -> dict[str, Any]:
    """The config.json of the release, without a model, and with architectures only where these tell the family."""
    raw = json.loads(case.hf_config().to_json_string())
    told = {"architectures": list(get_family(case.family).architectures)} if case.traits.released_beside else {}
    return _in_released_keys(case, raw | told) | told


def _stack_experts(path: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(path)
    for name in [name for name in tensors if ".experts.0." in name]:
        front, kind = name.split(".experts.0.")
        names = [each for each in tensors if each.startswith(f"{front}.experts.") and each.endswith(kind)]
        names.sort(key=lambda each: int(each.split(".experts.")[1].partition(".")[0]))
        stacked = "gate_and_up_projs" if kind.startswith("up") else "down_projs"
        tensors[f"{front}.experts.{stacked}"] = torch.stack([tensors.pop(each).T for each in names]).contiguous()
    save_file(tensors, path, {"format": "pt"})


def save(case: Case, folder: Path, dtype: str = "float32", seed: int = 0, returns: str = "") -> Path:
    """Writes the model as `save_pretrained` does, with weights of `dtype`, but with the names that releases have, and
    gives the folder back."""
    return as_released(case, save_pretrained(case, folder, dtype, seed, returns))


def save_pretrained(case: Case, folder: Path, dtype: str = "float32", seed: int = 0, returns: str = "") -> Path:
    """Writes the model as `save_pretrained` does."""
    import torch

    model = hf_model(case, seed, returns)
    if case.traits.thinker_of:
        import transformers

        whole = getattr(transformers, case.traits.thinker_of)(case.hf_config())
        whole.thinker = model
        model = whole
    with warnings.catch_warnings():  # the rotary positions of llama4's vision tower are complex
        warnings.filterwarnings("ignore", "Casting complex values to real")
        model.to(getattr(torch, dtype)).save_pretrained(folder)
    return folder


def as_released(case: Case, folder: Path) -> Path:
    """Gives the tensors that `save_pretrained` wrote the names that they have in releases."""
    if case.traits.released_tensors:
        _rename(folder, case.traits.released_tensors)
    if case.family.startswith("longcat_flash"):  # transformers writes matrices of the experts that have none
        _drop(folder / "model.safetensors", range(case.config["n_routed_experts"], 1 << 10))
    if case.family == "olmo_hybrid":  # transformers writes three convolutions of the same size
        _resplit(folder / "model.safetensors")
    if case.family == "molmo2":  # transformers writes two halves of the embedding
        resplit_embedding(folder / "model.safetensors", (SIZES | dict(case.config))["vocab_size"])
    if case.family == "nemo_speechlm":  # transformers writes experts one by one
        _stack_experts(folder / "model.safetensors")
    if case.family == "dory":  # transformers writes attention and MLP as one layer
        _as_blocks(folder / "model.safetensors")
    if case.config.get("n_shared_experts") == 0:  # which releases leave out
        _drop_empty(folder / "model.safetensors")
    if case.family == "step3p5":  # which transformers has inside step3p7 alone
        _unwrap(folder, "Step3p5ForCausalLM")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(_in_released_keys(case, config)))
    return folder


_RNG = np.random.default_rng(3)
PROMPTS = [list(map(int, _RNG.integers(3, 101, length))) for length in (9, 4, 1)]
"""Token ids that every case knows, of three lengths."""


def save_with_mtp(case: Case, folder: Path) -> Path:
    """Writes the model of a case of DeepSeek's kind, of 3 layers, with a layer for further tokens beside and its
    copies of the embedding and the head; gives the folder back."""
    from helpers.checkpoints import random_tensor, read_tensors, write_checkpoint

    save(case, folder, "bfloat16")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "deepseek_v3", "num_nextn_predict_layers": 1}
    tensors, rng = read_tensors(folder), np.random.default_rng(0)
    front, last = "model.layers.3.", "model.layers.2."
    layer = {name.replace(last, front): x[::-1] for name, x in tensors.items() if name.startswith(last)}
    D = config["hidden_size"]
    norms = {
        f"{front}{name}.weight": random_tensor(rng, (D,), "bfloat16") for name in ("enorm", "hnorm", "shared_head.norm")
    }
    copies = {
        f"{front}embed_tokens.weight": tensors["model.embed_tokens.weight"],
        f"{front}shared_head.head.weight": tensors["lm_head.weight"],
    }
    tensors |= layer | norms | copies | {f"{front}eh_proj.weight": random_tensor(rng, (D, 2 * D), "bfloat16")}
    return write_checkpoint(folder, config, tensors)
