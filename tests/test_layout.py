"""The notation against plain numpy: transforms, inverses, slices of targets, block scales."""

from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpuconv.errors import LayoutError
from tpuconv.notation.layout import (
    Layout,
    cut_sizes,
    format_axes,
    lead,
    parse_axes,
    runs,
    scale_layout,
    sliceable,
)
from tpuconv.notation.letters import LETTERS

WORDS = ("groups", "key_dim", "taps")
LAYOUTS = (
    "V D",
    "F D -> D F",
    "(N H) D -> D N H",
    "D (N H) -> N H D",
    "(N (P + H)) C -> C N P, C N H",
    "(C + R) D -> D C, D R",
    "((N H) + (K H) + (K H)) D -> D N H, D K H, D K H",
    "(F + F) D -> D F, D F",
    "F D, F D -> D (F + F)",
    "E D (M + M) -> E D M, E D M",
    "E (M + M) D -> E D M, E D M",
    "(N (P + R)) Q -> Q N P, Q N R",
    "(N (P R)) D -> D (N R P)",
    "(K G H) -> K G H",
    "E (M (1 + 1)) D -> E D M, E D M",
    "(M (1 + 1)) -> M, M",
    "((groups key_dim) + (groups H)) 1 taps -> groups key_dim taps, groups H taps",
)

sizes_strategy = st.fixed_dictionaries({letter: st.integers(1, 6) for letter in (*LETTERS, *WORDS)})


def tensors(layout: Layout, sizes: dict[str, int]) -> list[np.ndarray]:
    """Sources whose elements are all different."""
    out, at = [], 0
    for shape in layout.src_shapes(sizes):
        out.append(np.arange(at, at + prod(shape), dtype=np.int64).reshape(shape))
        at += prod(shape)
    return out


def test_plain_numpy_agrees():
    sizes = {"N": 3, "P": 2, "H": 4, "C": 5, "D": 6, "K": 2}
    (w,) = tensors(Layout.parse("(N (P + H)) C -> C N P, C N H"), sizes)
    k, v = Layout.parse("(N (P + H)) C -> C N P, C N H")([w], sizes)
    by_head = w.reshape(3, 6, 5)
    np.testing.assert_array_equal(k, by_head[:, :2].transpose(2, 0, 1))
    np.testing.assert_array_equal(v, by_head[:, 2:].transpose(2, 0, 1))

    (fused,) = tensors(Layout.parse("((N H) + (K H) + (K H)) D -> D N H, D K H, D K H"), sizes)
    q, k, v = Layout.parse("((N H) + (K H) + (K H)) D -> D N H, D K H, D K H")([fused], sizes)
    np.testing.assert_array_equal(q, fused[:12].T.reshape(6, 3, 4))
    np.testing.assert_array_equal(k, fused[12:20].T.reshape(6, 2, 4))
    np.testing.assert_array_equal(v, fused[20:].T.reshape(6, 2, 4))


@pytest.mark.parametrize("text", LAYOUTS)
@given(sizes=sizes_strategy)
def test_inverse_restores_every_element(text, sizes):
    layout = Layout.parse(text)
    sources = tensors(layout, sizes)
    targets = layout(sources, sizes)
    assert [t.shape for t in targets] == list(layout.dst_shapes(sizes))
    back = layout.inverse(targets, sizes)
    assert all(np.array_equal(a, b) for a, b in zip(sources, back, strict=True))


@pytest.mark.parametrize("text", LAYOUTS)
@given(sizes=sizes_strategy, data=st.data())
def test_a_slice_of_the_source_feeds_a_box_of_every_target(text, sizes, data):
    layout = Layout.parse(text)
    letters = sorted({x for t in layout.src for axis in t for x in axis.letters() if sliceable(layout, x)})
    chosen = data.draw(st.lists(st.sampled_from(letters), unique=True, max_size=2)) if letters else []
    # Two letters that lead one axis of a target do not make a box: the plan never cuts along both.
    ranges = {}
    for letter in chosen:
        start = data.draw(st.integers(0, sizes[letter] - 1))
        ranges[letter] = (start, data.draw(st.integers(start + 1, sizes[letter])))
    sources = tensors(layout, sizes)
    cut = cut_sizes(sizes, ranges)
    parts = [
        np.concatenate([s.reshape(-1)[a:b] for a, b in runs(axes, sizes, ranges)]).reshape(shape)
        for s, axes, shape in zip(sources, layout.src, layout.src_shapes(cut), strict=True)
    ]
    for whole, part, axes in zip(layout(sources, sizes), layout(parts, cut), layout.dst, strict=True):
        box = []
        for axis, n in zip(axes, whole.shape, strict=True):
            start, stop = ranges.get(lead(axis), (0, None))
            inner = n // sizes[lead(axis)] if lead(axis) in ranges else 1
            box.append(slice(start * inner, None if stop is None else stop * inner))
        np.testing.assert_array_equal(whole[tuple(box)], part)


def expand(scale: np.ndarray, blocks: tuple[int, ...], shape: tuple[int, ...]) -> np.ndarray:
    """The scale of every element."""
    for axis, block in enumerate(blocks):
        scale = np.repeat(scale, block, axis=axis)
    return scale[tuple(map(slice, shape))]


@pytest.mark.parametrize("text", LAYOUTS)
@given(sizes=sizes_strategy, data=st.data())
def test_scales_follow_their_weights(text, sizes, data):
    """Every element meets the same scale, whether the scales are applied before the layout or after it."""
    layout = Layout.parse(text)
    shapes = layout.src_shapes(sizes)
    blocks = [tuple(data.draw(st.integers(1, 8)) for _ in shape) for shape in shapes]
    scales, at = [], 0
    for shape, block in zip(shapes, blocks, strict=True):
        grid = tuple(-(-n // b) for n, b in zip(shape, block, strict=True))
        scales.append(np.arange(at, at + prod(grid)).reshape(grid))
        at += prod(grid)
    every = [expand(s, b, shape) for s, b, shape in zip(scales, blocks, shapes, strict=True)]
    follow = scale_layout(layout, sizes, blocks)
    for target, scale, block in zip(layout(every, sizes), follow(scales), follow.dst_blocks, strict=True):
        assert scale.shape == tuple(-(-n // b) for n, b in zip(target.shape, block, strict=True))
        np.testing.assert_array_equal(expand(scale, block, target.shape), target)


KV_A = ("(C + R) D -> D C, D R", {"C": 512, "R": 64, "D": 7168}, (1, 1), ((128, 128), (128, 64)))
KV_B = (
    "(N (P + H)) C -> C N P, C N H",
    {"N": 128, "P": 128, "H": 128, "C": 512},
    (1, 1),
    ((128, 1, 128), (128, 1, 128)),
)
Q_B = ("(N (P + R)) Q -> Q N P, Q N R", {"N": 128, "P": 128, "R": 64, "Q": 1536}, (2, 1), ((128, 1, 64), (128, 1, 64)))


# kv_a keeps its blocks, the last one partial; kv_b's fit its heads; q_b's heads of 192 do not fit 128.
@pytest.mark.parametrize(("text", "sizes", "refine", "dst_blocks"), [KV_A, KV_B, Q_B])
def test_scales_of_deepseek_are_refined_no_more_than_needed(text, sizes, refine, dst_blocks):
    follow = scale_layout(Layout.parse(text), sizes, [(128, 128)])
    assert (follow.refine, follow.dst_blocks) == ((refine,), dst_blocks)


@pytest.mark.parametrize(
    "text",
    ["(N H D -> D N H", "N H) D -> D", "(N H + K) D -> D", "N + H", "N H -> N", "N H -> N D", "? D", "(N + H -> N"],
)
def test_malformed_layouts_are_refused(text):
    with pytest.raises(LayoutError):
        Layout.parse(text)


def test_a_tensor_of_another_shape_is_refused():
    with pytest.raises(LayoutError, match="shape"):
        Layout.parse("F D -> D F")([np.zeros((3, 2))], {"F": 2, "D": 3})


@pytest.mark.parametrize("text", ["D N H", "(N H) D", "(N (P + R)) C", "V"])
def test_axes_are_read_as_written(text):
    assert format_axes(parse_axes(text)) == text
