"""Servers load what `--target huggingface` writes: vLLM's build for CPUs and tpu-inference, each in an environment of
its own. Run by `make consumers`: installing them takes minutes and 15 GB, and running them about half an hour.

What they compute is compared with `tpuconv.load` of the same parameters. The results go to build/consumers, of which
docs/make_consumers.py makes docs/consumers.md.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from zlib import crc32

import numpy as np
import pytest

import tpuconv
from helpers.checkpoints import read_tensors, write_checkpoint
from helpers.commands import EXAMPLE
from helpers.consumers import (
    BASE,
    CALIBRATIONS,
    EMBEDDING_FACTORS,
    EXACT,
    EXPERTS,
    FORMS,
    HAS_AMX,
    IDS,
    JAX_MODELS,
    MODELS,
    ROUNDS_ACTIVATIONS,
    TORCH_MODELS,
    TRAINED,
    VLLM,
    VLLM_EXPERTS,
    VLLM_GPT_OSS,
    WITH_EXPERTS,
    WITH_TPU_KERNEL,
    Outcome,
    forms_of,
)
from helpers.families import Case, save
from helpers.oracles import ROOT, ask
from helpers.served_sights import SERVED_SIGHTS, features_of
from tpuconv import api
from tpuconv.models.logits import forward
from tpuconv.quantize.config import configs_folder

pytestmark = [pytest.mark.slow, pytest.mark.consumers]

MOST_DIFFERENCE = 2e-5
RESULTS = ROOT / "build" / "consumers"


def divergence(ours: np.ndarray, theirs: np.ndarray) -> float:
    """The mean KL divergence of log-probabilities [T, V] from ours."""
    return float((np.exp(ours) * (ours - theirs)).sum(-1).mean())


@dataclass(frozen=True)
class Served:
    """A model, in a folder with all that is made of it."""

    name: str
    folder: Path

    @property
    def source(self) -> Path:
        if self.name == TRAINED:
            return EXAMPLE
        if not (self.folder / "hf").exists():
            save(MODELS[self.name], self.folder / "hf", "bfloat16")
            if factor := EMBEDDING_FACTORS.get(self.name):
                config = json.loads((self.folder / "hf" / "config.json").read_text())
                tensors = read_tensors(self.folder / "hf")
                embedding = tensors["model.embed_tokens.weight"]
                tensors["model.embed_tokens.weight"] = embedding * np.asarray(factor, embedding.dtype)
                write_checkpoint(self.folder / "hf", config, tensors)
        return self.folder / "hf"

    def rules(self, config: str) -> Path | None:
        """The rules of a form, in a file: those of a config of the package with a plain head, or rules themselves."""
        if not config:
            return None
        if config.startswith("{"):
            name, text = (
                f"rules-{crc32(config.encode()):08x}",
                f"qwix:\n  rules: [{config}]\ngates: none\n{CALIBRATIONS.get(config, '')}",
            )
        else:
            name, text = config, (configs_folder() / f"{config}.yaml").read_text().replace("|lm_head", "")
        (self.folder / f"{name}.yaml").write_text(text)
        return self.folder / f"{name}.yaml"

    def ours(self, config: str) -> Path:
        """A checkpoint of ours by these rules; its head is plain where a server's is."""
        rules = self.rules(config)
        out = self.folder / f"{rules.stem if rules else 'plain'}-ours"
        if out.exists():
            return out
        if config in CALIBRATIONS:
            api.quantize(self.source, out, config=rules, calibration="self", samples=8, length=64)
        else:
            api.convert(self.source, out, quantize=rules)
        return out

    def written(self, form: str) -> Path:
        """What `--target huggingface` writes, or `export` of what was calibrated."""
        config, scheme = FORMS[form].config, FORMS[form].scheme
        out = self.folder / form.replace(" ", "-")
        options = {"scheme": scheme} if scheme else {}
        if config in CALIBRATIONS:
            api.export(self.ours(config), out, **options)
            return out
        quantize = self.rules(config) if config.startswith("{") else config or None
        api.convert(self.source, out, target="huggingface", quantize=quantize, **options)
        return out


@cache
def our_logprobs(served: Served, config: str) -> np.ndarray:
    """Ours [T, V], of a checkpoint by these rules."""
    (logits,) = forward(tpuconv.load(served.ours(config), "float32"), [IDS], "float32")()
    exact = np.asarray(logits, np.float64)
    return exact - np.logaddexp.reduce(exact, -1, keepdims=True)


@dataclass
class Comparison:
    """What a program made of the forms of a model, and where that is not what the table says."""

    served: Served
    faults: list[str]
    results: dict[str, dict]

    def add(self, form: str, expected: Outcome, result: dict, found: Path) -> None:
        error, loaded = result.get("error", ""), result.get("loaded", False)
        if error:
            as_expected = bool(expected.error) and expected.error in error and expected.loads == loaded
            facts = {"error": expected.error if as_expected else short(error), "loaded": loaded}
        else:
            facts = self._compared(form, expected, np.load(found))
            as_expected = not expected.error and facts["is_right"]
        self.results[form] = facts
        if not as_expected:
            self.faults.append(f"{form}: expected {expected}, found {facts}")

    def _compared(self, form: str, expected: Outcome, theirs: np.ndarray) -> dict:
        ours, plain = our_logprobs(self.served, FORMS[form].config), our_logprobs(self.served, "")
        return compared(expected, ours, theirs, plain)


def compared(expected: Outcome, ours: np.ndarray, theirs: np.ndarray, plain: np.ndarray) -> dict:
    """What the log-probabilities [T, V] of a program are beside ours; `plain` are those of the plain model."""
    theirs = theirs[:, : ours.shape[1]]
    differences = np.abs(ours - theirs).max(-1) / np.abs(ours).max()
    is_same = differences <= MOST_DIFFERENCE
    facts = {
        "difference": float(differences.max(initial=0, where=is_same)),
        "same_tokens": float(is_same.mean()),
        "kl": divergence(ours, theirs),
        "quantization_kl": divergence(plain, ours),
    }
    most = max(expected.rounding, expected.most * facts["quantization_kl"])
    return facts | {"is_right": bool(is_same.all()) if expected.is_exact else facts["kl"] <= most}


def keep(title: str, model: str, forms: Mapping[str, dict]) -> None:
    """Writes the results of a program with the forms of a model."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{title}, {model}.json").write_text(json.dumps({"program": title, "model": model, "forms": forms}))


def short(error: str) -> str:
    return " ".join(error.split())[:300]


def compare(
    program: str,
    script: str,
    name: str,
    expected: Mapping[str, Outcome],
    folder: Path,
    dtype: str | None = None,
    **variables: str,
) -> None:
    """Raises AssertionError if a program does not do with each form what the table says. It computes in `dtype`, or in
    that of the form."""
    served = Served(name, folder)
    forms = [form for form in forms_of(name) if form in expected]
    models = [
        {"folder": str(served.written(form)), "dtype": dtype or FORMS[form].dtype, "out": str(folder / f"{i}.npy")}
        for i, form in enumerate(forms)
    ]
    ask(
        program,
        script,
        {"ids": IDS, "models": models, "results": str(folder / "results.json")},
        **variables,
    )
    title = " ".join([program, *variables.values()]) + (", AMX" if HAS_AMX and program == "vllm" else "")
    judge(title, served, {form: expected[form] for form in forms})


def judge(title: str, served: Served, expected: Mapping[str, Outcome]) -> None:
    """Compares what a program left in the folder of a model with what is expected of it, and writes the results."""
    found = json.loads((served.folder / "results.json").read_text())
    comparison = Comparison(served, [], {})
    for number, (form, result) in enumerate(zip(expected, found, strict=True)):
        comparison.add(form, expected[form], result, served.folder / f"{number}.npy")
    keep(title, served.name, comparison.results)
    assert not comparison.faults, "\n".join(comparison.faults)


@pytest.mark.parametrize("name", [TRAINED, *MODELS])
def test_vllm_loads_each_form(name: str, tmp_path: Path) -> None:
    expected = VLLM_GPT_OSS if name == "gpt_oss" else VLLM_EXPERTS if name in WITH_EXPERTS else VLLM
    compare("vllm", "vllm_logprobs.py", name, expected, tmp_path)


@pytest.mark.parametrize("name", SERVED_SIGHTS)
def test_vllm_sees_images(name: str, tmp_path: Path) -> None:
    """Two images in a prompt, with plain weights and with an int8 text model."""
    case, results = SERVED_SIGHTS[name], tmp_path / "results.json"
    images = case.save(tmp_path / "hf")
    forms = {"plain": EXACT, "int8": ROUNDS_ACTIVATIONS}
    models = []
    for number, form in enumerate(forms):
        api.convert(tmp_path / "hf", tmp_path / f"{number}-ours", quantize=FORMS[form].config or None)
        api.export(tmp_path / f"{number}-ours", tmp_path / f"{number}-theirs", form="released")
        folder = str(tmp_path / f"{number}-theirs")
        models.append({"folder": folder, "dtype": "float32", "out": str(tmp_path / f"{number}.npy")})
    request = {"prompt": case.prompt, "images": images, "length": 256, "models": models, "results": str(results)}
    ask("vllm", "vllm_logprobs.py", request)
    found = json.loads(results.read_text())
    features = features_of(tmp_path / "0-theirs", images)

    def ours(number: int) -> np.ndarray:
        ids_BT = np.array([found[number]["ids"]])
        model = tpuconv.load(tmp_path / f"{number}-ours", "float32")
        seen = model.see(ids_BT, **features)
        seen = replace(seen, block_BT=None) if case.has_causal_images else seen
        logits = np.asarray(model(ids_BT, seen=seen), np.float64)[0]
        return logits - np.logaddexp.reduce(logits, -1, keepdims=True)

    facts = {}
    for number, (form, expected) in enumerate(forms.items()):
        assert "error" not in found[number], found[number]
        theirs = np.load(tmp_path / f"{number}.npy")
        facts[form] = compared(expected, ours(number), theirs, ours(0))
        assert facts[form].pop("is_right"), facts
    keep("vllm, images", name, facts)


@pytest.mark.parametrize("name", JAX_MODELS)
def test_jax_models_of_tpu_inference_load_each_form(name: str, tmp_path: Path) -> None:
    script = "tpu_inference_logits.py"
    compare("tpu-inference", script, name, JAX_MODELS[name], tmp_path, MODEL_IMPL_TYPE="flax_nnx")


@pytest.mark.parametrize("name", TORCH_MODELS)
def test_torch_models_of_tpu_inference_load_each_form(name: str, tmp_path: Path) -> None:
    script = "tpu_inference_logits.py"
    compare("tpu-inference", script, name, TORCH_MODELS[name], tmp_path, "bfloat16", MODEL_IMPL_TYPE="vllm")


def test_tpu_inference_loads_the_experts_of_tpu_v7_in_their_groups(tmp_path: Path) -> None:
    sizes = BASE | EXPERTS | {"hidden_size": 512, "moe_intermediate_size": 1024}
    save(Case("tpu-v7-served", "qwen3_moe", "qwen3_moe", sizes), tmp_path / "hf", "bfloat16")
    api.convert(tmp_path / "hf", tmp_path / "out", target="huggingface", quantize="tpu_v7")
    models = [{"folder": str(tmp_path / "out"), "dtype": "bfloat16", "out": str(tmp_path / "0.npy")}]
    request = {"ids": IDS, "models": models, "results": str(tmp_path / "results.json")}
    ask("tpu-inference", "tpu_inference_logits.py", request, MODEL_IMPL_TYPE="vllm")
    (result,) = json.loads((tmp_path / "results.json").read_text())
    assert result.get("loaded"), result
    assert WITH_TPU_KERNEL.error in result["error"]
