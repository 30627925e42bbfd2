"""Places of patches and tokens against torch and transformers."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers as hf
from hypothesis import assume, example, given
from hypothesis import strategies as st
from transformers.models.idefics3.modeling_idefics3 import Idefics3VisionEmbeddings
from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe as omni
from transformers.models.radio.modeling_radio import RadioPatchEmbeddings
from transformers.vision_utils import (
    get_vision_interpolation_indices_and_weights,
    get_vision_nearest_position_ids,
    get_vision_position_ids,
)

from tpuconv.errors import UsageError
from tpuconv.models.common.mrope import MropeOfDimensions, mrope_positions, positions_in_images
from tpuconv.models.towers.encoder import resized
from tpuconv.models.towers.minicpm.canvas import Markers, canvas_positions
from tpuconv.models.towers.places import (
    Taps,
    antialiased_cubic_weights,
    antialiased_taps,
    bicubic_taps,
    bilinear_taps,
    bilinear_taps_of_centers,
    bilinear_weights,
    block_order,
    bucket,
    corner_taps,
    nearest_taps,
    nested_order,
    raster,
)
from tpuconv.models.towers.qformer.modules import area_weights

SIZE = st.integers(1, 40)
TABLE = st.integers(2, 24)


def interpolated(taps: Taps, table_HWD: np.ndarray, h: int, w: int) -> np.ndarray:
    rows_RD = table_HWD.reshape(-1, table_HWD.shape[-1])
    assert taps.weight_PA.dtype == np.float32
    return (rows_RD[taps.index_PA] * taps.weight_PA[..., None]).sum(1).reshape(h, w, -1)


def of_torch(table_HWD: np.ndarray, h: int, w: int, **how) -> np.ndarray:
    table_1DHW = torch.tensor(table_HWD).permute(2, 0, 1)[None]
    return torch.nn.functional.interpolate(table_1DHW, size=(h, w), **how)[0].permute(1, 2, 0).numpy()


@pytest.mark.parametrize(
    ("taps", "how"),
    [
        (bilinear_taps, {"mode": "bilinear", "align_corners": True}),
        (bilinear_taps_of_centers, {"mode": "bilinear", "align_corners": False}),
        (bicubic_taps, {"mode": "bicubic", "align_corners": False}),
        (antialiased_taps, {"mode": "bilinear", "align_corners": False, "antialias": True}),
    ],
)
@given(h=SIZE, w=SIZE, height=TABLE, width=TABLE)
def test_taps_interpolate_as_torch_does(taps, how, h, w, height, width):
    assume(w > 1 or "antialias" not in how)  # torch 2 repeats the first row of an image of width 1 there
    table_HWD = np.random.default_rng(h * w).standard_normal((height, width, 3)).astype(np.float32)
    have = interpolated(taps(h, w, height, width), table_HWD, h, w)
    np.testing.assert_allclose(have, of_torch(table_HWD, h, w, **how), atol=2e-5)


@pytest.mark.parametrize(
    ("weights", "how"),
    [
        (antialiased_cubic_weights, {"mode": "bicubic", "align_corners": False, "antialias": True}),
        (area_weights, {"mode": "area"}),
        (bilinear_weights, {"mode": "bilinear", "align_corners": False}),
    ],
)
@given(h=SIZE, w=SIZE, height=TABLE, width=TABLE)
@example(h=48, w=40, height=64, width=64)
def test_weights_of_axes_interpolate_as_torch_does(weights, how, h, w, height, width):
    assume(w > 1 or "antialias" not in how)
    table_HWD = np.random.default_rng(h * w).standard_normal((height, width, 3)).astype(np.float32)
    have = resized(table_HWD, weights(h, height), weights(w, width))
    np.testing.assert_allclose(have, of_torch(table_HWD, h, w, **how), atol=2e-5)


@pytest.mark.parametrize(("taps", "mode"), [(bilinear_taps_of_centers, "bilinear"), (bicubic_taps, "bicubic")])
@given(h=SIZE, w=SIZE, side=TABLE)
@example(h=8, w=4, side=4)
def test_taps_of_factors_interpolate_as_torch_does(taps, mode, h, w, side):
    """Hy4-VL gives torch factors for a tenth of a patch more."""
    table_HWD = np.random.default_rng(h * w).standard_normal((side, side, 3)).astype(np.float32)
    table_1DHW, factors = torch.tensor(table_HWD).permute(2, 0, 1)[None], ((h + 0.1) / side, (w + 0.1) / side)
    want = torch.nn.functional.interpolate(table_1DHW, scale_factor=factors, mode=mode, align_corners=False)
    have = interpolated(taps(h, w, side, side, 0.1), table_HWD, h, w)
    np.testing.assert_allclose(have, want[0].permute(1, 2, 0).numpy(), atol=2e-5)


@given(h=SIZE, w=SIZE, side=TABLE)
def test_images_that_are_no_squares_have_the_corner_of_the_positions_of_one(h, w, side):
    table_HWD = np.random.default_rng(h * w).standard_normal((side, side, 3)).astype(np.float32)
    self = SimpleNamespace(position_embedding=torch.tensor(table_HWD), max_rows=side, max_cols=side)
    want = RadioPatchEmbeddings._interpolate_position_embedding(self, (h, w), torch.float32)
    have = interpolated(corner_taps(h, w, side, side), table_HWD, h, w)
    np.testing.assert_allclose(have.reshape(-1, 3), want[0].numpy(), atol=2e-5)


@pytest.mark.parametrize(
    ("taps", "mode", "aligned"), [(bilinear_taps, "bilinear", True), (bicubic_taps, "bicubic", False)]
)
@given(h=SIZE, w=SIZE, side=TABLE)
def test_taps_are_those_of_the_reference(taps, mode, aligned, h, w, side):
    index, weight = get_vision_interpolation_indices_and_weights(torch.tensor([[1, h, w]]), side, mode, aligned)
    have = taps(h, w, side, side)
    np.testing.assert_array_equal(have.index_PA, index)
    np.testing.assert_array_equal(have.weight_PA, weight)


SIDES = st.sampled_from([16, 26, 27, 32, 64, 70])
"""The sides of tables of releases. The reference's limits of other sides depend on the processor that computes them."""


@given(h=st.integers(1, 80), w=st.integers(1, 80), side=st.sampled_from([16, 32, 64]))  # powers of 2: limits are exact
def test_the_nearest_rows_are_those_of_minicpm(h, w, side):
    taps = nearest_taps(h, w, side, side, divides=True)
    np.testing.assert_array_equal(taps.index_PA[:, 0], get_vision_nearest_position_ids(torch.tensor([[h, w]]), side))
    assert (taps.weight_PA == 1).all()


@given(h=st.integers(1, 80), w=st.integers(1, 80), side=SIDES)
def test_the_nearest_rows_are_those_of_idefics(h, w, side):
    config = hf.Idefics3VisionConfig(hidden_size=1, image_size=side, patch_size=1, num_channels=1)
    embeddings = Idefics3VisionEmbeddings(config)
    with torch.no_grad():
        embeddings.patch_embedding.weight.zero_()
        embeddings.patch_embedding.bias.zero_()
        embeddings.position_embedding.weight.copy_(torch.arange(side * side)[:, None])
        want = embeddings(torch.zeros(1, 1, h, w), torch.ones(1, h, w, dtype=torch.bool))
    np.testing.assert_array_equal(nearest_taps(h, w, side, side).index_PA[:, 0], want.flatten())


@given(rows=st.integers(1, 9), columns=st.integers(1, 9), merge=st.integers(1, 3))
def test_blocks_are_in_the_reference_order(rows, columns, merge):
    h, w = rows * merge, columns * merge
    want = get_vision_position_ids(torch.tensor([[1, h, w]]), merge)
    np.testing.assert_array_equal(raster(h, w)[block_order(h, w, merge)], want)


def test_blocks_of_blocks():
    """Each four patches are a block, each 16 a block of four such blocks, row by row."""
    at = raster(8, 12)[nested_order(8, 12, [2, 2])]
    for size, side in ((4, 2), (16, 4)):
        corners = at.reshape(-1, size, 2) // side
        assert (corners == corners[:, :1]).all()
    np.testing.assert_array_equal(at[:16:4], [[0, 0], [0, 2], [2, 0], [2, 2]])
    np.testing.assert_array_equal(at[::16], [[0, 0], [0, 4], [0, 8], [4, 0], [4, 4], [4, 8]])


def test_blocks_must_be_whole():
    with pytest.raises(UsageError, match="5 x 4 patches"):
        block_order(5, 4, 2)


MERGE = 2
PARTS = st.lists(
    st.one_of(
        st.tuples(st.just(0), st.integers(1, 9)),
        st.tuples(st.just(1), st.integers(1, 6), st.integers(1, 6)),
        st.tuples(st.just(2), st.integers(1, 6), st.integers(1, 6), st.integers(1, 4)),
    ),
    min_size=1,
    max_size=6,
)


def layout(parts, split: bool):
    """Returns kinds of tokens, the grids in order, and those of images and of videos, with text before and after each;
    text separates the frames of a video if `split`."""
    kinds, grids = [0], []
    for part in parts:
        if part[0] == 0:
            kinds += [0] * part[1]
            continue
        kind, h, w, t = *part[:3], part[3] if part[0] == 2 else 1
        grids.append((kind, (t, MERGE * h, MERGE * w)))
        runs = [h * w] * t if split else [t * h * w]
        kinds += [k for run in runs for k in [*[kind] * run, 0]]
    by_kind = [[grid for kind, grid in grids if kind == which] for which in (1, 2)]
    return kinds, [grid for _, grid in grids], *by_kind


REFERENCES = {
    "qwen2_vl": (hf.Qwen2VLModel, False, 1),
    "qwen2_5_vl": (hf.Qwen2_5_VLModel, False, 4),
    "qwen3_vl": (hf.Qwen3VLModel, True, 1),
    "qwen3_5": (hf.Qwen3_5Model, True, 1),
    "glm4v": (hf.Glm4vModel, True, 1),
}
"""The model, whether text separates frames, and positions in time of a second."""


@pytest.mark.parametrize("name", REFERENCES)
@given(parts=PARTS, seconds=st.sampled_from([1.0, 0.4, 2.5]))
def test_positions_are_those_of_the_reference(name, parts, seconds):
    model, split, rate = REFERENCES[name]
    kinds, grids, images, videos = layout(parts, split)
    self = SimpleNamespace(
        config=SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=MERGE, tokens_per_second=rate)),
        get_vision_position_ids=lambda *a, **k: model.get_vision_position_ids(None, *a, **k),
    )
    more = {"second_per_grid_ts": torch.full((len(videos),), seconds)} if rate > 1 else {}
    want, delta = model.get_rope_index(
        self,
        torch.zeros(1, len(kinds), dtype=torch.long),
        torch.tensor([kinds]),
        torch.tensor(images) if images else None,
        torch.tensor(videos) if videos else None,
        **more,
    )
    step = rate * seconds if rate > 1 else 1
    intervals = [step if part[0] == 2 else 1 for part in parts if part[0]]
    at_3T, have_delta = mrope_positions(kinds, grids, MERGE, intervals)
    np.testing.assert_array_equal(at_3T, want[:, 0])
    assert have_delta == int(delta)


SOUND_OR_IMAGE = st.lists(
    st.one_of(
        st.tuples(st.just("image"), st.integers(1, 6), st.integers(1, 6)),
        st.tuples(st.just("sound"), st.integers(1, 300), st.integers(0, 4)),
    ),
    max_size=5,
)


@given(parts=SOUND_OR_IMAGE)
def test_positions_of_images_and_sounds_are_those_of_omni(parts):
    # without an image the reference counts on for other reasons
    ids, kinds, grids, lengths = [1, 20, 10, 21], [0, 0, 1, 0], [(1, MERGE, MERGE)], []
    for kind, *sizes in parts:
        if kind == "image":
            grids.append((1, MERGE * sizes[0], MERGE * sizes[1]))
            inside, of, ends = sizes[0] * sizes[1], 10, (20, 21)
        else:
            lengths.append(sizes[0])
            inside, of, ends = int(omni._get_feat_extract_output_lengths(torch.tensor(sizes[0]))), 11, (22, 23)
        ids += [ends[0], *[of] * inside, ends[1]]
        kinds += [0, *[1 if of == 10 else 3] * inside, 0]
    config = SimpleNamespace(
        image_token_id=10,
        audio_token_id=11,
        video_token_id=12,
        vision_start_token_id=20,
        audio_start_token_id=22,
        position_id_per_seconds=13,
        audio_config=SimpleNamespace(n_window=50),
    )
    cls = omni.Qwen3OmniMoeThinkerForConditionalGeneration
    self = SimpleNamespace(config=config, spatial_merge_size=MERGE)
    self.get_llm_pos_ids_for_vision = lambda *a: cls.get_llm_pos_ids_for_vision(self, *a)
    tokens = torch.tensor([ids])
    want, delta = cls.get_rope_index(
        self, tokens, torch.tensor(grids), None, torch.ones_like(tokens), audio_seqlens=torch.tensor(lengths)
    )
    at_3T, have_delta = mrope_positions(kinds, grids, MERGE)
    np.testing.assert_array_equal(at_3T, want[:, 0])
    assert have_delta == int(delta)


def test_images_without_text_between_are_told_apart_by_their_sizes():
    at_3T, delta = mrope_positions([1] * 6 + [0], [(1, 2, 2), (1, 1, 2)], 1)
    np.testing.assert_array_equal(at_3T[0], [0, 0, 0, 0, 2, 2, 4])
    np.testing.assert_array_equal(at_3T[2], [0, 1, 0, 1, 2, 3, 4])
    assert delta == -2


def test_a_text_without_images_counts_on():
    at_3T, delta = mrope_positions([0, 0, 3, 0], [], 2)
    np.testing.assert_array_equal(at_3T, [[0, 1, 2, 3]] * 3)
    assert delta == 0
    assert mrope_positions([], [], 2)[1] == 0


@given(sizes=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), max_size=4), axes=st.integers(3, 5))
def test_positions_in_images_are_those_of_hunyuan(sizes, axes):
    """With more than four axes the first of them are equal, and with three the first one is left out."""
    kinds = [0, 0]
    for h, w in sizes:
        kinds += [*[1] * (h * (w + 1) + 2), 0]
    self = SimpleNamespace(
        config=SimpleNamespace(
            text_config=SimpleNamespace(rope_parameters={"mrope_section": [2] * axes}),
            vision_config=SimpleNamespace(spatial_merge_size=MERGE),
        ),
        get_vision_position_ids=lambda *a, **k: hf.HunYuanVLModel.get_vision_position_ids(None, *a, **k),
    )
    grids = torch.tensor([(1, MERGE * h, MERGE * w) for h, w in sizes]) if sizes else None
    want, delta = hf.HunYuanVLModel.get_rope_index(
        self, torch.zeros(1, len(kinds), dtype=torch.long), torch.tensor([kinds]), grids
    )
    at_4T, have_delta = positions_in_images(np.array(kinds) == 1, [(1, h, w + 1) for h, w in sizes])
    axis_of = MropeOfDimensions((2,) * axes).axis_of_angles(2 * axes)[::4]
    np.testing.assert_array_equal(at_4T[axis_of], want[:, 0])
    assert have_delta == int(delta) == 0


def test_other_tokens_among_the_placeholders_of_an_image_are_an_error():
    with pytest.raises(UsageError, match="another token among them"):
        positions_in_images(np.array([1, 1, 1, 0, 1]), [(1, 1, 2)])


PLACEHOLDER, START, END, SLICE_START, SLICE_END, NEWLINE = range(10, 16)
MARKERS = Markers(SLICE_START, (START, END, SLICE_END, NEWLINE))
SMALL = st.integers(1, 9)
PICTURES = st.lists(
    st.one_of(
        st.sampled_from([[1], [NEWLINE], [END], [START], [1, NEWLINE]]),
        st.tuples(SMALL, SMALL, st.integers(0, 3), st.integers(1, 3), SMALL, SMALL, st.booleans()),
    ),
    max_size=6,
)
"""Texts between images, and images with the rows and columns of slices, which are of one size."""


@given(parts=PICTURES)
@example(parts=[(3, 8, 2, 2, 4, 7, True), [NEWLINE], (2, 2, 0, 1, 1, 1, True), (2, 2, 1, 3, 2, 2, True), [1]])
def test_positions_on_canvases_are_those_of_minicpm(parts):
    ids, grids = [1], []

    def write(h: int, w: int, before: int, behind: int) -> None:
        ids.extend([before, *[PLACEHOLDER] * (h * w), behind])
        grids.append((h, w))

    for part in parts:
        if isinstance(part, list):
            ids += part
            continue
        h, w, rows, columns, slice_h, slice_w, has_markers = part
        write(h, w, *((START, END) if has_markers else (1, 1)))
        for row in range(rows):
            ids += [NEWLINE] if row else []
            for _ in range(columns):
                write(slice_h, slice_w, SLICE_START, SLICE_END)
    names = ("image_start_id", "image_end_id", "slice_start_id", "slice_end_id", "newline_id")
    of_names = dict(zip(names, (START, END, SLICE_START, SLICE_END, NEWLINE), strict=True))
    self = SimpleNamespace(config=SimpleNamespace(downsample_mode="16x", **of_names))
    for name in ("_group_visual_frames", "get_vision_position_ids"):
        setattr(self, name, partial(getattr(hf.MiniCPMV4_7Model, name), self))
    self._frame_end_idx = hf.MiniCPMV4_7Model._frame_end_idx
    tokens = torch.tensor([ids])
    want, delta = hf.MiniCPMV4_7Model.get_rope_index(
        self, tokens, (tokens == PLACEHOLDER).int(), torch.tensor(grids) * 4 if grids else None
    )
    at_3T, have_delta = canvas_positions(np.array(ids), PLACEHOLDER, [(1, h, w) for h, w in grids], MARKERS)
    np.testing.assert_array_equal(at_3T, want[:, 0])
    assert have_delta == int(delta)


@pytest.mark.parametrize("grids", [[], [(1, 4, 6)], [(1, 4, 2), (1, 4, 4), (1, 2, 2)]])
def test_grids_and_tokens_must_match(grids):
    with pytest.raises(UsageError, match="the text has 5 tokens for images"):
        mrope_positions([0, 1, 1, 1, 1, 1, 0], grids, 2)


def test_buckets_are_powers_of_two():
    assert [bucket(n) for n in (1, 256, 257, 16384)] == [256, 256, 512, 16384]
    assert [bucket(n, 4) for n in (0, 1, 5, 8)] == [4, 4, 8, 8]
    assert bucket(200, multiple=9) == 261
