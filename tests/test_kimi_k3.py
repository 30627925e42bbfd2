"""The format of the release of Kimi K3."""

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import tpuconv
from helpers.checkpoints import read_tensors, write_checkpoint
from helpers.conversions import restore, same_bits
from helpers.encoded import dequantized
from helpers.released import KIMI_K3_MXFP4
from helpers.whole_sights import difference, logits, made
from tpuconv import api


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
    config["text_config"]["quantization_config"] = KIMI_K3_MXFP4
    write_checkpoint(folder, config, tensors)
    return values


@pytest.mark.slow
def test_experts_in_mxfp4(whole, tmp_path):
    """Experts in MXFP4, all else as it is: logits of the decoded model, and every byte back from the kept one."""
    case, model = made("kimi_k3"), deepcopy(made("kimi_k3").model)
    values = in_mxfp4(whole("kimi_k3")[0], tmp_path / "src")
    assert len(values) == 2 * 4 * 3
    assert not model.load_state_dict(values, strict=False).unexpected_keys
    api.convert(tmp_path / "src", tmp_path / "plain")
    want = replace(case, model=model).reference(case.ids_BT, case.mask_BT, case.features)[case.mask_BT]
    assert difference(logits(case, tpuconv.load(tmp_path / "plain")), want) < case.tolerance
    api.convert(tmp_path / "src", tmp_path / "kept", encoding="keep")
    api.export(tmp_path / "kept", tmp_path / "back")
    source, back = read_tensors(tmp_path / "src"), read_tensors(tmp_path / "back")
    assert back.keys() == source.keys()
    assert all(np.array_equal(back[name], source[name]) for name in source)
    have, plain = dequantized(restore(tmp_path / "kept")), restore(tmp_path / "plain")
    assert not [name for name in plain if not same_bits(have[name], plain[name])]
