"""Absurd numbers in config.json are refused at once, and values of wrong types are errors, not crashes."""

import json
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest

from helpers.configs import ENCODINGS, NAMES, WEIGHTS, config_json, plan_of
from helpers.families import CORE
from helpers.times import ProcessorTime
from tpuconv import patterns
from tpuconv.convert.plan.coverage import make_plan
from tpuconv.convert.plan.types import Options
from tpuconv.encodings.schemes import METHOD_SCHEMAS
from tpuconv.encodings.tensors import decode_names
from tpuconv.errors import ConfigError, MappingError, TpuconvError, UnsupportedConfig
from tpuconv.models.common.key_types import hints_of
from tpuconv.models.common.rope import OPTIONAL
from tpuconv.models.registry import find_family
from tpuconv.models.tokenizer import end_tokens
from tpuconv.sources.config import read_config
from tpuconv.sources.source import Source

SECONDS, BYTES = 60, 300_000_000
"""Of the processor: the slowest takes one second, and what is not refused takes hours."""


def refused(raw: dict[str, Any]) -> Exception | None:
    """The error that a config.json is refused with, in bounded time."""
    began, error = time.process_time(), None
    try:
        plan_of(raw)
    except TpuconvError as e:
        error = e
    assert time.process_time() - began < SECONDS, raw
    return error


@cache
def marks(name: str) -> list[pytest.MarkDecorator]:
    """Those of a test of this model_type."""
    return [] if find_family({"model_type": name}).name in CORE else [pytest.mark.slow]


def integers() -> Iterator[Any]:
    """Every key of every model_type that is an integer and is read."""
    for name in NAMES:
        config = find_family({"model_type": name}).config
        for field, hint in hints_of(config).items():
            if int in (hint, *get_args(hint)) and field not in config.derived | config.left_out:
                yield pytest.param(name, config._key(field), marks=marks(name))


EVERY_NAME = pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in NAMES])


@pytest.mark.parametrize(("name", "key"), list(integers()))
def test_a_number_that_no_model_has_is_refused_at_once(name, key):
    for value in (10**6, 10**8):
        refused(config_json(name, **{key: value}))
    for value in (10**10, 10**30):
        error = refused(config_json(name, **{key: value}))
        assert isinstance(error, ConfigError | UnsupportedConfig)
        assert f"={value} is" in str(error)  # more than, or not implemented


WORST = {
    "llama": {"num_hidden_layers": 4096, "vocab_size": 10**8},
    "qwen3_moe": {"num_hidden_layers": 4096, "num_experts": 40},
    "mixtral": {"num_hidden_layers": 2, "num_local_experts": 1 << 16},
    "gpt_oss": {"num_hidden_layers": 4096, "num_local_experts": 1 << 16},
    "deepseek_v3": {"num_nextn_predict_layers": 4096, "num_hidden_layers": 4096, "first_k_dense_replace": 4096},
    "llama4": {"num_hidden_layers": 4096, "moe_layers": list(range(4096)), "no_rope_layers": [1] * 4096},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WORST)
def test_the_largest_numbers_that_are_read_take_bounded_memory(name):
    raw = config_json(name, **WORST[name])
    tracemalloc.start()
    try:
        plan_of(raw)
    except TpuconvError:
        pass
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 2 * BYTES


def test_experts_times_layers_are_counted_before_they_are_listed():
    raw = config_json("qwen3_moe", num_hidden_layers=4096, num_experts=1 << 16)
    assert "asks for 805343235 tensors, with 4096 layers of 65536 experts" in str(refused(raw))
    family = find_family(raw)
    config = family.config.from_hf(raw)
    with pytest.raises(MappingError, match="asks for 805343235 tensors, and x has 0"):
        make_plan(Source(Path("x"), raw, {}, ()), family.name, family.table, config, Options())


@EVERY_NAME
def test_tables_count_what_they_list(name):
    raw = config_json(name)
    family = find_family(raw)
    config = family.config.from_hf(raw)
    for mtp in (False, True) if "U" in config.layer_sets else (False,):
        for table in (family.table, *([] if config.unscannable else [family.table.stack_layers(config)])):
            names = [name for binding in table.bind(config, mtp) for name in binding.src_shapes()]
            assert table.count(config, mtp) == len(names)


ODD = (1.5, -1, 0, True, "x", "", [], [1], ["x"], [{}], [[]], {}, {"a": 1}, {"factor": {}}, float("nan"))


@EVERY_NAME
def test_a_value_of_another_type_is_an_error_that_is_meant(name):
    fields = sorted(hints_of(find_family({"model_type": name}).config).keys() - {"rope", "mrope", "towers"})
    nested = [{"rope_type": kind, key: value} for kind in OPTIONAL for key in OPTIONAL[kind] for value in ODD]
    cases = [(key, value) for key in (*fields, "rope_theta", "hidden_act", "pruned_heads") for value in ODD]
    cases += [(key, value) for key in ("rope_parameters", "rope_scaling") for value in (*ODD, *nested)]
    for key, value in cases:
        refused(config_json(name, **{key: value}))
    for key in ("rope_parameters", "rope_scaling"):
        error = refused(config_json(name, **{key: 1.5}))
        assert f"{key}=1.5 is not an object" in str(error)
    error = refused(config_json(name, **{fields[0]: [0] * 1_000_000}))
    assert len(str(error)) < 1000


@pytest.mark.parametrize("name", ["llama", "llama4"])
def test_a_million_keys_are_refused_at_once(name):
    error = refused(config_json(name, **{f"key_{i}": i for i in range(100_000)}, **{"x" * 1_000_000: 1}))
    assert isinstance(error, UnsupportedConfig)
    assert len(str(error)) < 5000


# -- encodings --------------------------------------------------------------------------------------------------------


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    for key, own in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(own, (*path, key))


def changed(value: Any, path: tuple[Any, ...], other: Any) -> Any:
    if not path:
        return other
    out = dict(value) if isinstance(value, dict) else list(value)
    out[path[0]] = changed(value[path[0]], path[1:], other)
    return out


@pytest.mark.parametrize("method", ENCODINGS)
def test_a_description_of_another_type_is_an_error_that_is_meant(method):
    assert method in METHOD_SCHEMAS
    whole = {"quant_method": method, **ENCODINGS[method]}
    plan_of(config_json("llama", quantization_config=whole))
    for path in places(whole):
        for other in (*ODD, 10**30, ["re:("], {"a": {"b": []}}):
            raw = config_json("llama", quantization_config=changed(whole, path, other))
            refused(raw)
            with suppress(ConfigError, UnsupportedConfig):
                decode_names({}, raw["quantization_config"])


@pytest.mark.parametrize(
    ("encoding", "message"),
    [
        (5, "config.json, quantization_config: must be an object, not 5"),
        ([], "config.json, quantization_config: must be an object"),
        ({"quant_method": ["fp8"]}, "quant_method must be a text or null"),
        ({"quant_method": "fp8", "modules_to_not_convert": 5}, "modules_to_not_convert must be a list or null, not 5"),
        ({"quant_method": "fp8", "modules_to_not_convert": [5]}, r"modules_to_not_convert\[0\] must be a text, not 5"),
        (
            {"quant_method": "modelopt", "quantization": {"quant_algo": 1}},
            "hf_quant_config.json: quantization.quant_algo must be a text or null, not 1",
        ),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"group_0": 7}},
            "config_groups.group_0 must be an object, not 7",
        ),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"targets": {"a": 1}}}},
            "config_groups.group_0.targets must be a list or null",
        ),
    ],
)
def test_a_key_of_another_type_is_named(encoding, message):
    with pytest.raises(ConfigError, match=message):
        decode_names({}, encoding)
    with pytest.raises(ConfigError, match=message):
        plan_of(config_json("llama", quantization_config=encoding))


REDOS = "([a-z.0-9_]+)+Z"


@pytest.mark.parametrize(
    ("encoding", "where"),
    [
        (ENCODINGS["fp8"] | {"quant_method": "fp8", "modules_to_not_convert": [REDOS]}, "modules_to_not_convert"),
        (ENCODINGS["compressed-tensors"] | {"ignore": ["re:(.*)*(.*)*(.*)*Z"]}, "ignore"),
        (
            ENCODINGS["compressed-tensors"]
            | {"config_groups": {"group_0": {"targets": [f"re:{REDOS}"], "weights": WEIGHTS}}},
            "targets",
        ),
    ],
)
def test_a_pattern_that_is_matched_for_ever_is_refused(encoding, where):
    with (
        ProcessorTime(children=True) as taken,
        pytest.raises(ConfigError, match=f"config.json, {where}: matching .* takes too long"),
    ):
        plan_of(config_json("llama", quantization_config={"quant_method": "compressed-tensors", **encoding}))
    assert taken.seconds < 10 * patterns.SECONDS  # of the child's processor time, of which it may take one


def test_wildcards_are_harmless():
    encoding = {
        "quant_method": "modelopt",
        "quant_algo": "FP8",
        "exclude_modules": ["*a" * 500, "lm_head", "[a-z]*" * 300],
    }
    refused(config_json("llama", quantization_config=encoding))


def test_a_file_of_modelopt_of_another_type_is_named(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config_json("llama")))
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": {}}}')
    with pytest.raises(ConfigError, match=r"hf_quant_config\.json: quantization\.quant_algo must be a text"):
        plan_of(read_config(tmp_path / "config.json"))


# -- end tokens -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "raw", "message"),
    [
        ("generation_config.json", {"eos_token_id": [{"a": 1}]}, r"eos_token_id\[0\] must be an integer"),
        ("generation_config.json", {"eos_token_id": "2"}, "eos_token_id must be an integer"),
        ("generation_config.json", {"eos_token_id": -1}, "eos_token_id must be an integer from 0"),
        ("config.json", {"eos_token_id": True}, "eos_token_id must be an integer"),
        ("config.json", {"text_config": 5}, "text_config must be an object or null, not 5"),
        ("config.json", {"text_config": {"eos_token_id": [1.5]}}, r"text_config\.eos_token_id\[0\] must be an integer"),
        ("generation_config.json", [], "holds no JSON object"),
    ],
)
def test_end_tokens_of_another_type_are_named(name, raw, message, tmp_path):
    (tmp_path / name).write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match=f"{name}.*{message}"):
        end_tokens(tmp_path)


def test_end_tokens_are_those_of_either_file(tmp_path):
    assert end_tokens(tmp_path) == frozenset()
    (tmp_path / "config.json").write_text('{"text_config": {"eos_token_id": [1, 2]}}')
    assert end_tokens(tmp_path) == {1, 2}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 3}')
    assert end_tokens(tmp_path) == {3}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": null}')
    assert end_tokens(tmp_path) == {1, 2}
