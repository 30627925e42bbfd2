"""The layer-by-layer comparison: the same numbers as for complete models, and the layer that diverges is named."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers import released_code
from helpers.checkpoints import hollow_checkpoint, qwen3_config, random_checkpoint, read_tensors, write_checkpoint
from helpers.conversions import convert
from helpers.families import BY_ID, CASES, OWN_CACHE, Case, is_inseparable, one_fast_of_each, save
from helpers.schemes import encode
from tpuconv.checkpoint.manifest import read_manifest
from tpuconv.convert.plan.types import Options
from tpuconv.errors import SourceError, UnsupportedConfig, UsageError
from tpuconv.models.logits import whole_texts
from tpuconv.verify import reference
from tpuconv.verify.layerwise import ComparedOutputs, compare_layers
from tpuconv.verify.logits import model_logits

RNG = np.random.default_rng(5)
PROMPTS = [list(map(int, RNG.integers(3, 90, length))) for length in (19, 7)]
WHOLE = {case.family: case for case in CASES}.values()  # of ours in one piece a case of each family: it compiles long


def compared(out: Path, source: Path, dtype: str = "float32") -> ComparedOutputs:
    return compare_layers(read_manifest(out), source, whole_texts(PROMPTS), dtype)


NOT_READ = {
    *("longcat_flash", "bailing_moe", "param2moe", "internlm2", "mimo_v2", "chatglm", "PanguEmbedded", "telechat3"),
    *released_code.MODELS,
}
"""Families whose releases transformers does not load: it wants matrices of the experts that have none, or does not have
the model."""


@pytest.fixture
def aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies the parameters of transformers' whole model. Where they lie in the file some begin at no multiple of 64
    bytes, which changes the last bit of products."""
    outputs = reference._outputs

    def of_copies(model: Any, *args: Any) -> Any:
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
        return outputs(model, *args)

    monkeypatch.setattr(reference, "_outputs", of_copies)


SEPARABLE = [case for case in CASES if not is_inseparable(case) and case.family not in NOT_READ]


@pytest.mark.parametrize("case", one_fast_of_each(OWN_CACHE, SEPARABLE))
def test_the_numbers_are_those_of_whole_models(case: Case, hf: Any, orbax: Any, aligned: None) -> None:
    parts, reference_outputs, ours, _ = compared(orbax(case), hf(case))
    theirs = reference_outputs.logits
    layers = case.config.get("num_hidden_layers", 2)
    assert [part.name for part in parts] == ["embedding", *(f"layer {i}" for i in range(layers))]
    assert not [part for part in parts if part.diverges]
    scale = max(np.abs(x).max() for x in theirs)
    for mine, whole in zip(theirs, reference.reference(hf(case), whole_texts(PROMPTS), "float32").logits, strict=True):
        np.testing.assert_array_equal(mine, whole)
    assert max(np.abs(a - b).max() for a, b in zip(theirs, ours, strict=True)) <= 2e-5 * scale
    if case in WHOLE:
        for mine, whole in zip(ours, model_logits(orbax(case), PROMPTS, "float32"), strict=True):
            np.testing.assert_allclose(mine, whole, rtol=0, atol=5e-6 * scale)


ENCODED = Path(__file__).parent / "data"


@pytest.mark.slow
@pytest.mark.parametrize("source", ["auto-round/awq", "auto-round/gptq", "bitsandbytes/nf4_nested", "modelopt/w4a8"])
def test_encoded_matrices_are_decoded_for_transformers(source: str, tmp_path: Path) -> None:
    """In the order of axes that its modules have; for the whole model it wants packages that decode them."""
    convert(ENCODED / source, tmp_path / "out")
    prompts = [[3, 9, 5, 20, 7], [4, 4, 8]]
    parts, reference_outputs, ours, _ = compare_layers(
        read_manifest(tmp_path / "out"), ENCODED / source, whole_texts(prompts), "bfloat16"
    )
    theirs = reference_outputs.logits
    assert not [part for part in parts if part.diverges]
    scale = max(np.abs(x).max() for x in theirs)
    assert max(np.abs(a - b).max() for a, b in zip(theirs, ours, strict=True)) <= 0.03 * scale
    if not source.startswith("modelopt"):  # described beside config.json, or not known at all
        with pytest.raises(UsageError, match=r"transformers cannot load .*(gptqmodel|optimum|bitsandbytes)"):
            reference.reference(ENCODED / source, whole_texts(prompts), "bfloat16")


@pytest.mark.slow
def test_what_transformers_does_not_load_is_an_error(hf: Any, orbax: Any) -> None:
    """In both comparisons. When transformers loads it this fails, and it can be compared as the others are."""
    case = BY_ID["longcat_flash-plain"]
    with pytest.raises(SourceError, match=r"has no tensors for mlp.experts.gate_up_proj of transformers' layers\.0"):
        compared(orbax(case), hf(case))
    with pytest.raises(UnsupportedConfig, match=r"did not load .* nothing is said about the conversion"):
        reference.reference(hf(case), whole_texts(PROMPTS), "float32")


def test_stacked_layers_are_read_one_at_a_time(hf: Any, orbax: Any, tmp_path: Path) -> None:
    case = BY_ID["qwen2-windows"]
    convert(hf(case), tmp_path / "out", Options(scan_layers=True))
    stacked, plain = compared(tmp_path / "out", hf(case)), compared(orbax(case), hf(case))
    assert stacked.errors == plain.errors
    np.testing.assert_array_equal(stacked.ours[0], plain.ours[0])


@pytest.mark.parametrize(
    ("tensor", "first", "dtype"),
    [
        ("model.layers.1.self_attn.o_proj.weight", "layer 1", "float32"),
        ("model.layers.2.post_attention_layernorm.weight", "layer 2", "bfloat16"),
        pytest.param("model.layers.1.self_attn.o_proj.weight", "layer 1", "bfloat16", marks=pytest.mark.slow),
        pytest.param("model.layers.2.post_attention_layernorm.weight", "layer 2", "float32", marks=pytest.mark.slow),
        pytest.param("model.embed_tokens.weight", "embedding", "float32", marks=pytest.mark.slow),
        pytest.param("model.embed_tokens.weight", "embedding", "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_the_first_layer_that_departs_is_named(tensor: str, first: str, dtype: str, hf: Any, tmp_path: Path) -> None:
    source = hf(BY_ID["llama-tied-llama3"])
    tensors = {name: x.copy() for name, x in read_tensors(source).items()}
    tensors[tensor][..., :20] *= -1
    config = json.loads((source / "config.json").read_text())
    convert(write_checkpoint(tmp_path / "damaged", config, tensors), tmp_path / "out")
    parts = compared(tmp_path / "out", source, dtype).errors
    assert [part.name for part in parts if part.diverges] == [first]  # by itself, whatever came before, no other does
    at = [part.name for part in parts].index(first)
    assert all(part.error > part.gate for part in parts[at:])


def test_a_source_in_fp8_is_compared_by_its_values(tmp_path: Path) -> None:
    """Which transformers would not load without a GPU."""
    folder = random_checkpoint(tmp_path / "hf", qwen3_config(), "float32")
    encode(folder, (8, 12))
    convert(folder, tmp_path / "out")
    parts = compared(tmp_path / "out", folder).errors
    assert max(part.error for part in parts) < 1e-5


def test_a_source_in_mxfp4_is_compared_by_its_values(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_local_experts": 3, "num_experts_per_tok": 2}
    folder = save(Case("gpt_oss-mxfp4", "gpt_oss", "gpt_oss", sizes | {"head_dim": 12}), tmp_path / "hf")
    tensors, rng = read_tensors(folder), np.random.default_rng(0)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = rng.integers(0, 256, (experts, outputs, inputs // 32, 16), np.uint8)
        tensors[f"{name}_scales"] = rng.integers(122, 126, (experts, outputs, inputs // 32), np.uint8)
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
    convert(write_checkpoint(folder, config, tensors), tmp_path / "out")
    parts = compared(tmp_path / "out", folder).errors
    assert max(part.error for part in parts) < 1e-5


def test_what_cannot_be_compared_is_refused(hf: Any, orbax: Any, tmp_path: Path) -> None:
    case = BY_ID["llama-plain"]
    convert(hf(case), tmp_path / "part", Options(layers=range(1)))
    with pytest.raises(UsageError, match="not a complete model"):
        compared(tmp_path / "part", hf(case))
    tensors = read_tensors(hf(case))
    del tensors["model.layers.1.mlp.up_proj.weight"]
    write_checkpoint(tmp_path / "hf", json.loads((hf(case) / "config.json").read_text()), tensors)
    with pytest.raises(SourceError, match=r"has no model\.layers\.1\.mlp\.up_proj\.weight"):
        compared(orbax(case), tmp_path / "hf")


PEAK = """
import sys
from pathlib import Path
from tpuconv.memory import peak_memory
from tpuconv.checkpoint.manifest import read_manifest
from tpuconv.models.logits import Window
from tpuconv.verify.layerwise import compare_layers
peaks = []
compare_layers(read_manifest(Path(sys.argv[1])), Path(sys.argv[2]), [Window([1, 2, 3])], "float32",
               lambda part: peaks.append(peak_memory()))
print(*peaks)
"""


@pytest.mark.slow
def test_memory_is_that_of_a_layer_and_not_of_the_model(tmp_path: Path) -> None:
    layers = 12
    config = qwen3_config(hidden_size=1024, intermediate_size=5120, num_hidden_layers=layers)
    folder = hollow_checkpoint(tmp_path / "hf", config)
    plan = convert(folder, tmp_path / "out")
    layer = 4 * plan.parameters / layers  # in float32
    command = [sys.executable, "-c", PEAK, str(tmp_path / "out"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    _, _, second, *later = map(int, done.stdout.split())  # the first layer compiles
    assert len(later) == layers - 2
    assert later[-1] - second < layer
