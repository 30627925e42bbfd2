"""Calibration on images and sounds: layers that run one by one see what the model sees."""

import numpy as np
import pytest

import tpuconv
from helpers.sights import SIGHTS
from helpers.whole_sights import difference
from tpuconv.checkpoint.manifest import read_manifest
from tpuconv.errors import UnsupportedConfig
from tpuconv.models.common.loops import LoopedDecoder
from tpuconv.models.logits import Window, forward_each
from tpuconv.models.registry import get_family
from tpuconv.models.stored import model_config
from tpuconv.quantize.calibrate.data import Sample
from tpuconv.quantize.calibrate.layers import HEAD_STAGE, LayerRunner
from tpuconv.verify.sights import sight_windows

TEXT = np.random.default_rng(0).integers(3, 90, 60).tolist()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "qwen3_vl" else [pytest.mark.slow]) for name in SIGHTS]
)
def test_layers_that_run_one_by_one_see_the_same(name, whole):
    """And a text among the samples is read as alone."""
    manifest = read_manifest(whole(name)[1])
    config = model_config(manifest)
    windows, without = sight_windows(manifest, config, [TEXT])
    if not windows:
        pytest.skip(f"no example: {without}")
    for window in windows:
        windows_of_both = [window, Window([*TEXT, *[5] * len(window.ids)][: len(window.ids)])]
        samples = [Sample(each.ids, each.features) for each in windows_of_both]
        is_looped = len(config.executed_layers) > config.num_hidden_layers
        is_looped |= issubclass(get_family(manifest.family).model_class, LoopedDecoder)
        if is_looped or config.attends_to_images:
            with pytest.raises(UnsupportedConfig, match=r"one by one|attend to images"):
                LayerRunner(manifest, len(window.ids), example=samples[0])
            return
        runner = LayerRunner(manifest, len(window.ids), example=samples[0])
        want = forward_each(tpuconv.load(manifest.folder), windows_of_both, "float32")()
        for states_TW, logits_TV in zip(runner.embedded(samples), want, strict=True):
            for stage in runner.stages:
                if stage != HEAD_STAGE:
                    states_TW = runner.run(stage, runner.weights(stage), states_TW)
            assert difference(runner.logits(runner.logits_weights(), states_TW), logits_TV) < 2e-5
