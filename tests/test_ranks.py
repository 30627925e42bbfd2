"""Releases in files of tensor-parallel ranks, as Grok 2."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tpuconv
from helpers.buckets import ROOT, in_memory
from helpers.checkpoints import read_tensors
from helpers.conversions import assert_same, restore
from helpers.families import FIRST, save
from helpers.quantizing import leaves
from helpers.ranks import RANKS, write_ranked
from tpuconv import api
from tpuconv.checkpoint.manifest import read_manifest
from tpuconv.errors import HubError, SourceError
from tpuconv.models.registry import find_family
from tpuconv.sources.hub import resolve
from tpuconv.sources.ranks import mark_of_rank, ranked_files
from tpuconv.sources.shard import changed_shards

GROK2: dict[str, Any] = {
    "architectures": ["Grok1ForCausalLM"],
    "model_type": "git",
    "embedding_multiplier_scale": 90.50966799187809,
    "output_multiplier_scale": 0.5,
    "vocab_size": 131072,
    "hidden_size": 8192,
    "intermediate_size": 32768,
    "moe_intermediate_size": 16384,
    "max_position_embeddings": 131072,
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "residual_moe": True,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "num_hidden_layers": 64,
    "head_dim": 128,
    "rms_norm_eps": 1e-05,
    "final_logit_softcapping": 50,
    "attn_logit_softcapping": 30.0,
    "router_logit_softcapping": 30.0,
    "rope_theta": 208533496,
    "attn_temperature_len": 1024,
    "sliding_window_size": -1,
    "global_attn_every_n": 1,
    "torch_dtype": "bfloat16",
    "rope_type": "original",
    "original_max_position_embeddings": 8192,
    "scaling_factor": 16.0,
    "extrapolation_factor": 1.0,
    "attn_factor": 1.0,
    "beta_fast": 8,
    "beta_slow": 1,
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(FIRST["grok"], tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def ranked(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_ranked(whole, tmp_path_factory.mktemp("ranked"))


def test_grok_2_has_its_size() -> None:
    report = find_family(GROK2).check_config(GROK2)
    shapes = [s for row in find_family(GROK2).table.bind(report.config) for s in row.src_shapes().values()]
    assert f"{sum(map(np.prod, shapes)) / 1e9:.1f}" == "269.5"
    assert not report.ignored


@pytest.mark.parametrize("scan", [False, True])
def test_pieces_are_joined(scan: bool, whole: Path, ranked: Path, tmp_path: Path) -> None:
    for name, src in (("whole", whole), ("ranked", ranked)):
        api.convert(src, tmp_path / name, scan_layers=scan)
        api.verify(tmp_path / name).check()
    assert_same(restore(tmp_path / "ranked"), restore(tmp_path / "whole"))
    assert len(read_manifest(tmp_path / "ranked").raw["source"]["shards"]) == 2 + 2 * RANKS
    api.export(tmp_path / "ranked", tmp_path / "back")
    assert_same(read_tensors(tmp_path / "back"), read_tensors(whole))
    assert not (tmp_path / "back" / "model.safetensors.index.json").exists()


def test_a_release_in_pieces_is_loaded_and_quantized(whole: Path, ranked: Path, tmp_path: Path) -> None:
    for src in (whole, ranked):
        api.convert(src, tmp_path / f"{src.name}-int8", quantize="int8_default.yaml")
        api.convert(src, tmp_path / f"{src.name}-hf", target="huggingface")
    assert_same(*(leaves(tpuconv.load(src)) for src in (ranked, whole)))
    assert_same(restore(tmp_path / f"{ranked.name}-int8"), restore(tmp_path / f"{whole.name}-int8"))
    assert_same(read_tensors(tmp_path / f"{ranked.name}-hf"), read_tensors(whole))


def test_a_missing_file_of_a_rank_is_named(ranked: Path, tmp_path: Path) -> None:
    lost = "pytorch_model-00003-TP-002.safetensors"
    shutil.copytree(ranked, tmp_path, ignore=lambda *_: [lost], dirs_exist_ok=True)
    with pytest.raises(SourceError, match="1 file of tensor-parallel ranks is missing") as error:
        api.plan(tmp_path)
    assert list(error.value.details) == [lost]


def test_files_that_are_of_no_rank() -> None:
    assert ranked_files(["model.safetensors", "a-TP-common.safetensors", "b-TP-1.safetensors"]) == []
    assert ranked_files(["a-TP-000.safetensors", "c-TP-common.safetensors", "x"]) == [
        *("a-TP-000.safetensors", "c-TP-common.safetensors")
    ]
    assert "w" + mark_of_rank("a-TP-011.safetensors") == "w.rank.11"
    assert "w" + mark_of_rank("a-TP-common.safetensors") == "w" + mark_of_rank("model.safetensors") == "w"


def test_a_changed_file_of_a_rank_is_noticed(ranked: Path, tmp_path: Path) -> None:
    src = shutil.copytree(ranked, tmp_path / "src")
    api.convert(src, tmp_path / "out")
    known = read_manifest(tmp_path / "out").raw["source"]["shards"]
    assert changed_shards(src, known, {}) == []
    name = "pytorch_model-00002-TP-001.safetensors"
    data = bytearray((src / name).read_bytes())
    data[-1] ^= 1
    (src / name).write_bytes(data)
    assert changed_shards(src, known, {}) == [name]


def test_the_number_of_ranks_has_to_divide_experts(ranked: Path) -> None:
    raw = json.loads((ranked / "config.json").read_text()) | {"moe_intermediate_size": 22}
    with pytest.raises(tpuconv.errors.ConfigError, match="the width 22 of an expert is not divisible by 4 ranks"):
        find_family(raw).read_config(raw, tensors=[f"w.rank.{rank}" for rank in range(RANKS)])


def test_a_release_in_pieces_on_the_hub_and_in_a_bucket(
    whole: Path, ranked: Path, serve_hub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    serve_hub({"xai-org/grok-2": ranked})
    api.convert(whole, tmp_path / "whole")
    api.convert("xai-org/grok-2", tmp_path / "fetched")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    shutil.rmtree(tmp_path / "fetched")
    with pytest.raises(HubError, match="grok-2"):
        api.convert("xai-org/grok-2", tmp_path / "fetched")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    resolve("xai-org/grok-2")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    api.convert("xai-org/grok-2", tmp_path / "cached")
    bucket = in_memory(monkeypatch)
    for path in ranked.iterdir():
        bucket.put(f"src/{path.name}", path.read_bytes())
    api.convert(f"{ROOT}/src", tmp_path / "from-bucket")
    for name in ("cached", "from-bucket"):
        assert_same(restore(tmp_path / name), restore(tmp_path / "whole"))
