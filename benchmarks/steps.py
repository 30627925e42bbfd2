"""Estimates decode steps with the TPU compiler, without a TPU. Prints the table of benchmarks/README.md.

    python benchmarks/steps.py [WORD ...]

Prints the rows whose titles have all the words; by default all rows. A row takes 1 to 10 minutes: the decode step of
the complete model is compiled.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tpuconv.quantize.config import find_config
from tpuconv.verify.topology.chips import Slice
from tpuconv.verify.topology.request import CompileRequest, FitReport, ask, source_passthrough

CONFIGS = Path(__file__).parent / "configs"


KEPT = "kept"
"""Instead of a config: quantized values and scales pass through as released."""


class Row(NamedTuple):
    """One step. `published` are the milliseconds that others measured with their own program for the same step."""

    model: str
    quantization: str | None
    topology: str
    batch: int
    context: int
    cache: str = "bfloat16"
    published: float | None = None

    @property
    def title(self) -> str:
        return (
            f"{self.model} {self.quantization or 'bfloat16'} {self.topology} {self.batch} {self.context} {self.cache}"
        )


ROWS = (
    Row("llama-3.3-70b", "int8_weight_only", "v5e:4x4", 8, 2048),
    Row("llama-3.3-70b", "int8_weight_only", "v5e:4x4", 8, 2048, "int8", published=1e3 / 159),
    Row("deepseek-r1", "int8_weight_only", "v5e:8x8", 8, 512, published=1e3 / 48.0),
    Row("deepseek-r1", "int8_weight_only", "v5e:8x8", 64, 4096),
    Row("deepseek-r1", "fp8_weight_only", "v5e:8x8", 64, 4096),
    Row("deepseek-r1", "int8_weight_only", "v6e:8x8", 64, 4096),
    Row("deepseek-r1", "fp8_weight_only", "v6e:8x8", 64, 4096),
    Row("deepseek-r1", KEPT, "v5e:8x8", 8, 512),
    Row("deepseek-r1", KEPT, "v5e:8x8", 64, 4096),
    Row("gpt-oss-120b", "mxfp4_weight_only", "v5e:2x4", 8, 4096),
    Row("gpt-oss-120b", KEPT, "v5e:2x4", 8, 4096),
    Row("kimi-k2", "int4_weight_only", "v5e:8x8", 8, 4096),
    Row("kimi-k2-thinking", KEPT, "v5e:8x8", 8, 4096),
    Row("qwen3-32b", None, "v6e:2x4", 1, 512, published=1e3 / 108),
    Row("qwen3-32b", None, "v6e:2x4", 128, 4096, published=1e3 / 42),
    Row("qwen3-32b", None, "v6e:2x4", 512, 512, published=1e3 / 41),
    Row("qwen3-32b", None, "v6e:2x4", 512, 1024),
)
"""Published times are those of jax-llm-examples (Llama 3.1 70B with an int8 cache, DeepSeek R1) and of martin-marek's
jax-llm."""

COLUMNS = (
    *("step", "weights", "cache", "temporaries", "code", "XLA's peak", "HBM read, written", "floor ms", "estimate ms"),
    *("published ms", "estimate / published"),
)


def answers(rows: list[Row]) -> Iterator[tuple[Row, FitReport]]:
    for row in rows:
        config = json.loads((CONFIGS / f"{row.model}.json").read_text())
        question = CompileRequest(
            config,
            row.batch,
            row.context,
            quantize=quantization(row, config),
            cache_dtype=row.cache,
            programs=("decode",),
        )
        yield row, next(ask(question, [[Slice(row.topology)]]))


def quantization(row: Row, config: dict[str, Any]) -> dict[str, Any] | None:
    if row.quantization == KEPT:
        return source_passthrough(row.model, config)
    return find_config(row.quantization).to_json() if row.quantization else None


def cells(row: Row, answer: FitReport) -> Iterator[str]:
    memory, decode = answer.memory, answer.program("decode")
    yield row.title
    if decode is None:
        yield answer.why
        return
    for nbytes in (memory.weights, memory.cache, memory.temporaries, memory.code, decode.peak):
        yield f"{nbytes / 1e9:.2f}"
    yield f"{decode.hbm_read / 1e9:.2f}, {decode.hbm_written / 1e9:.2f}"
    every, expected, estimate = (1e3 * seconds for seconds in (decode.floor, decode.expected_floor, decode.estimate))
    yield f"{every:.2f}" + (f" ({expected:.1f})" if expected < 0.99 * every else "")
    yield f"{estimate:.1f}"
    if row.published:
        yield f"{row.published:.1f}"
        yield f"{estimate / row.published:.2f}"


def main(words: list[str]) -> None:
    print("| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS), flush=True)
    rows = [row for row in ROWS if all(word in row.title.split() for word in words)]
    for row, answer in answers(rows):
        print("| " + " | ".join(cells(row, answer)) + " |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
