"""Exports say the rotary positions in the keys of transformers 5 and in older ones."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from helpers import released_code
from helpers.checkpoints import qwen3_config, random_checkpoint
from helpers.families import CASES, LINEAR, LLAMA3, YARN
from tpuconv import api
from tpuconv.errors import ConfigError, UnsupportedConfig
from tpuconv.models.common.rope_keys import with_older_rope_keys, without_older_rope_keys
from tpuconv.models.named import example_config
from tpuconv.models.registry import family_names, find_family, get_family

PART = {"partial_rotary_factor": 0.5}
DEFAULT = {"rope_type": "default", "rope_theta": 500.0}
KEPT_BY_TRANSFORMERS = dict.fromkeys(("phi3", "phi4_multimodal"), ("partial_rotary_factor",))
"""The keys that their configs keep as they were given, beside the same values in `rope_parameters`."""


def by_type(full: dict, sliding: dict) -> dict:
    return {"full_attention": full, "sliding_attention": sliding}


def scaling(parameters: dict) -> dict:
    return {key: value for key, value in parameters.items() if key != "rope_theta"}


def example(name: str) -> tuple[dict, dict]:
    """A config.json of a family, and the object in it that has the keys of the text model."""
    raw = example_config(get_family(name))
    inside = [
        config_of(raw | {"text_config": {**raw.get("text_config", {}), key: value}})
        for key, value in (("num_hidden_layers", 3), ("rms_norm_eps", 0.25))
    ]
    is_inside = any(found and (found.num_hidden_layers == 3 or found.rms_norm_eps == 0.25) for found in inside)
    return raw, raw.setdefault("text_config", {}) if is_inside else raw


def config_of(raw: dict) -> Any:
    """The config that is read; None if it is refused."""
    with suppress(ConfigError, UnsupportedConfig):
        return find_family(raw).read_config(raw)
    return None


@pytest.mark.parametrize("name", family_names())
def test_a_scaling_in_the_older_key_is_read_or_refused(name: str) -> None:
    """A model that a user extended is never one without the extension."""
    raw, place = example(name)
    plain = config_of(raw)
    if plain is None or all(rope is None for rope in plain.ropes):
        return  # no rotary positions, or it needs keys without defaults
    place["rope_scaling"] = {"rope_type": "linear", "factor": 8.0}
    found = config_of(raw)
    assert found is None or found.ropes != plain.ropes


@pytest.mark.parametrize(
    ("name", "sections"),
    [("qwen3_5_text", [1, 2]), ("qwen3_vl", [1, 2]), ("qwen2_vl", [1, 1, 1]), ("glm_ocr", [8, 8, 12])],
)
def test_sections_that_no_head_has_are_refused(name: str, sections: list[int]) -> None:
    raw, place = example(name)
    place |= {"rope_scaling": {"rope_type": "default", "mrope_section": sections}, "rope_theta": 10000.0}
    with pytest.raises(ConfigError) as error:
        find_family(raw).read_config(raw)
    assert "are not time, rows and columns of" in str(error.value.details)


@pytest.mark.parametrize("parameters", [LLAMA3, YARN, LINEAR], ids=lambda parameters: parameters["rope_type"])
def test_a_scaling_is_said_twice(parameters):
    older = {"rope_theta": parameters["rope_theta"], "rope_scaling": scaling(parameters)}
    assert with_older_rope_keys({"rope_parameters": parameters}) == {"rope_parameters": parameters} | older
    part = {"text_config": {"rope_parameters": parameters}, "rope_scaling": None}
    assert with_older_rope_keys(part)["text_config"] == {"rope_parameters": parameters} | older


@pytest.mark.parametrize(
    ("config", "older"),
    [
        ({"rope_parameters": DEFAULT}, {"rope_theta": 500.0}),
        ({"rope_parameters": DEFAULT | PART}, {"rope_theta": 500.0} | PART),
        *(
            ({"model_type": kind, "rope_parameters": DEFAULT | PART}, {"rotary_emb_base": 500.0, "rotary_pct": 0.5})
            for kind in ("gpt_neox", "gpt_neox_japanese")
        ),
        (
            {"model_type": "gemma3_text", "rope_parameters": by_type(LINEAR, DEFAULT)},
            {"rope_theta": 10000.0, "rope_scaling": scaling(LINEAR), "rope_local_base_freq": 500.0},
        ),
        (
            {"model_type": "olmo3", "rope_parameters": by_type(YARN, DEFAULT | {"rope_theta": 100.0})},
            {"rope_theta": 100.0, "rope_scaling": scaling(YARN)},
        ),
        # What the older keys cannot say, and what a config says in them already.
        ({"model_type": "olmo3", "rope_parameters": by_type(YARN, DEFAULT)}, {}),
        ({"model_type": "gemma3_text", "rope_parameters": by_type(DEFAULT, LINEAR)}, {}),
        ({"model_type": "laguna", "rope_parameters": by_type(DEFAULT, DEFAULT)}, {}),
        ({"rope_parameters": DEFAULT, "rope_theta": 6e6}, {}),
        ({"rope_theta": 6e6, "rope_scaling": scaling(LLAMA3)}, {}),
    ],
    ids=str,
)  # fmt: skip
def test_older_keys_are_those_of_the_model_type(config, older):
    assert with_older_rope_keys(config) == config | older
    assert without_older_rope_keys(config | older) == config


def test_what_is_for_other_programs_has_both(tmp_path: Path):
    """A plain export is the release again."""
    config = qwen3_config(rope_parameters=LLAMA3 | {"rope_theta": 1000.0})
    config.pop("rope_theta", None)
    random_checkpoint(tmp_path / "hf", config)
    for name, options in (
        ("ckpt", {}),
        ("plain", {"target": "huggingface"}),
        ("int8", {"target": "huggingface", "quantize": "int8_weight_only"}),
    ):
        api.convert(tmp_path / "hf", tmp_path / name, **options)
    api.quantize(tmp_path / "ckpt", tmp_path / "quantized", config="int8_weight_only")
    api.export(tmp_path / "quantized", tmp_path / "int8-export")
    for name in ("plain", "int8", "int8-export"):
        written = json.loads((tmp_path / name / "config.json").read_text())
        written.pop("quantization_config", None)
        assert written == config | {"rope_theta": 1000.0, "rope_scaling": scaling(LLAMA3)}
        assert api.plan(tmp_path / name).plan.config == api.plan(tmp_path / "hf").plan.config
    api.export(tmp_path / "ckpt", tmp_path / "export")
    assert json.loads((tmp_path / "export" / "config.json").read_text()) == config


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case.family not in released_code.MODELS], ids=str)
def test_every_family_is_read_as_without_them(case, tmp_path: Path):
    """By transformers, and by us."""
    from transformers import AutoConfig

    def read(config: dict, name: str) -> tuple[dict, object]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        theirs = AutoConfig.from_pretrained(tmp_path / name).to_dict()
        theirs.pop("_name_or_path", None)
        if case.written_as:
            return theirs, None
        return theirs, find_family(config).check_config(config)

    config = json.loads(case.hf_config().to_json_string())
    before, after = read(config, "before"), read(with_older_rope_keys(config), "after")
    for key in KEPT_BY_TRANSFORMERS.get(case.family, ()):
        assert after[0].pop(key) == after[0]["rope_parameters"][key]
        before[0].pop(key, None)
    assert before == after
