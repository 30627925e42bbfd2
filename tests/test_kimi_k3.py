"""Kimi K3 whole against its reference in torch, which transformers does not have: images, the way back, its MXFP4."""

import json
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tpuconv
from helpers.checkpoints import read_tensors, write_checkpoint
from helpers.conversions import restore, same_bits
from helpers.encoded import dequantized
from helpers.released import KIMI_K3_MXFP4, KIMI_K3_VISION
from helpers.released_code.kimi_vision import Config, KimiK3ForConditionalGeneration
from helpers.sights import GRIDS, IMAGE, TEXT, Sight, noise, tiny, without_head_dim
from helpers.whole_sights import difference, logits
from tpuconv import api
from tpuconv.checkpoint.manifest import read_manifest

pytestmark = pytest.mark.slow

K3_TEXT = {
    **without_head_dim(TEXT),
    "model_type": "kimi_linear",
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "attn_res_block_size": 2,
    "num_experts": 4,
    "num_experts_per_token": 2,
    "num_shared_experts": 1,
    "moe_intermediate_size": 32,
    "routed_expert_hidden_size": 32,
    "linear_head_dim": 8,
    "linear_num_heads": 3,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "gate_lower_bound": -5.0,
    "hidden_act": "situ",
    "rms_norm_eps": 1e-3,
}
K3_VISION = {
    **KIMI_K3_VISION,
    "init_pos_emb_height": 5,
    "init_pos_emb_width": 5,
    "mm_hidden_size": 24,
    "patch_size": 4,
    "qkv_hidden_size": 48,
    "vt_hidden_size": 24,
    "vt_intermediate_size": 40,
    "vt_num_attention_heads": 3,
    "vt_num_hidden_layers": 2,
}


@cache
def made() -> Sight:
    config = Config(text_config=K3_TEXT, vision_config=K3_VISION, media_placeholder_token_id=IMAGE)
    rows = [[5, 9, *[IMAGE] * 15, 3, *[IMAGE] * 8, 11, 7], [7, *[IMAGE] * 8, 3]]
    patches = noise(int(GRIDS.prod(axis=1).sum()), 3, 4, 4)
    model = tiny(KimiK3ForConditionalGeneration, config)
    return Sight(model, rows, {"pixel_values": patches, "image_grid_thw": GRIDS})


@pytest.fixture(scope="session")
def k3(tmp_path_factory):
    folder = tmp_path_factory.mktemp("k3")
    made().save(folder / "src")
    api.convert(folder / "src", folder / "out")
    return folder / "src", folder / "out"


def test_logits_with_images(k3):
    case = made()
    want = case.reference(case.ids_BT, case.mask_BT, case.features)[case.mask_BT]
    assert difference(logits(case, tpuconv.load(k3[1])), want) < case.tolerance


def test_frames_of_clips(k3):
    grids = np.array([(2, 6, 4), (3, 4, 8)])
    patches = noise(int(grids.prod(axis=1).sum()), 3, 4, 4)
    with torch.no_grad():
        want = made().model.features(torch.tensor(patches), torch.tensor(grids)).numpy()
    model: Any = tpuconv.load(k3[1])
    seen = model.see(np.full((1, len(want)), IMAGE), pixel_values=patches, image_grid_thw=grids)
    assert difference(seen.features_XD[: len(want)], want) < 1e-5


def assert_comes_back(src: Path, out: Path, back: Path) -> None:
    api.export(out, back)
    source, have = read_tensors(src), read_tensors(back)
    assert have.keys() == source.keys()
    assert all(np.array_equal(have[name], source[name]) for name in source)


def test_every_tensor_comes_back(k3, tmp_path):
    src, out = k3
    assert read_manifest(out).parts
    assert_comes_back(src, out, tmp_path / "back")


def in_mxfp4(src: Path, folder: Path) -> dict[str, torch.Tensor]:
    """Writes the experts as compressed-tensors packs them; returns what it unpacks."""
    packing = pytest.importorskip("compressed_tensors.compressors", reason="pip install compressed-tensors")
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    group = KIMI_K3_MXFP4["config_groups"]["group_0"]
    scheme = QuantizationScheme(**group)
    library = packing.BaseCompressor.get_value_from_registry(group["format"])
    tensors, values = {}, {}
    for name, tensor in read_tensors(src).items():
        if ".experts." not in name:
            tensors[name] = tensor
            continue
        blocks = torch.tensor(tensor).unflatten(-1, (-1, 32))
        scales, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), scheme.weights)
        packed = library.compress({"weight": torch.tensor(tensor), "weight_scale": scales}, scheme)
        tensors |= {name.replace("weight", kind): x.numpy() for kind, x in packed.items() if x is not None}
        values[name] = library.decompress(packed, scheme)["weight"].float()
    config = json.loads((src / "config.json").read_text())
    write_checkpoint(
        folder, {**config, "text_config": {**config["text_config"], "quantization_config": KIMI_K3_MXFP4}}, tensors
    )
    return values


def test_the_format_of_the_release(k3, tmp_path):
    """Experts in MXFP4, all else as it is: logits of the decoded model, and every byte back from the kept one."""
    case, model = made(), deepcopy(made().model)
    values = in_mxfp4(k3[0], tmp_path / "src")
    assert len(values) == 2 * 4 * 3
    assert not model.load_state_dict(values, strict=False).unexpected_keys
    api.convert(tmp_path / "src", tmp_path / "plain")
    want = replace(case, model=model).reference(case.ids_BT, case.mask_BT, case.features)[case.mask_BT]
    assert difference(logits(case, tpuconv.load(tmp_path / "plain")), want) < case.tolerance
    api.convert(tmp_path / "src", tmp_path / "kept", encoding="keep")
    assert_comes_back(tmp_path / "src", tmp_path / "kept", tmp_path / "back")
    have, plain = dequantized(restore(tmp_path / "kept")), restore(tmp_path / "plain")
    assert not [name for name in plain if not same_bits(have[name], plain[name])]
