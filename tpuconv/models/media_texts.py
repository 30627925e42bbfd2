"""The texts that the processors of releases write for an image or a sound: a placeholder for each of its features, and
tokens that frame them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, isqrt, prod
from typing import Any

from tpuconv.errors import ConfigError
from tpuconv.jsonfile import short
from tpuconv.models.towers.llava.tiles import fitting_size, inside_padding, shrunk
from tpuconv.models.towers.qwen_audio.family import halved

FRAME_MASKS = ("feature_attention_mask", "input_features_mask")
"""Names of the masks of frames that are no padding."""
PIECES = "pieces"
"""The number of pieces that each sound is cut into."""


@dataclass(frozen=True)
class MediaItem:
    """One image or sound of a prompt.

    Attributes:
        index: its number among the images or sounds of the prompt.
        features: everything that the image processor or feature extractor returned for all of them.
        extractor: this processor or extractor, which has its settings as attributes.
        processor: processor_config.json, the settings of the model's whole processor.
        config: config.json.
        token: returns a special token by its name.
    """

    index: int
    features: Mapping[str, Any]
    extractor: Any
    processor: Mapping[str, Any]
    config: Mapping[str, Any]
    token: Callable[[str], str]

    def of(self, name: str) -> Any:
        """Returns this item's value of one of the features."""
        return self.features[name][self.index]

    def setting(self, name: str, default: Any) -> Any:
        """Returns a setting of processor_config.json; the default if it is missing or null."""
        given = self.processor.get(name)
        return default if given is None else given

    def number(self, name: str, default: int) -> int:
        """Returns a setting that is a whole number."""
        return int(self.setting(name, default))

    @property
    def vision(self) -> Mapping[str, Any]:
        """The `vision_config` of config.json."""
        found: Mapping[str, Any] = self.config.get("vision_config") or {}
        return found


ItemWriter = Callable[[MediaItem], str]


def by_grid(item: MediaItem) -> str:
    """A placeholder for each block of merged patches (Qwen-VL and others)."""
    patches = prod(map(int, item.of("image_grid_thw")))
    return item.token("image_token") * (patches // int(item.extractor.merge_size) ** 2)


def by_patch(item: MediaItem) -> str:
    """A placeholder for each patch that the image processor counts (Inkling)."""
    return item.token("image_token") * int(item.of("num_patches"))


def by_block(item: MediaItem) -> str:
    """A placeholder for each block of the grid (Inkling 2)."""
    return item.token("image_token") * prod(map(int, item.of("image_grid_thw")))


def single(item: MediaItem) -> str:
    """One token, behind which layers attend to the image (Llama 3.2 Vision)."""
    return item.token("image_token")


def phi4_image(item: MediaItem) -> str:
    """As many placeholders as the image processor counts (Phi-4-multimodal)."""
    return item.token("image_token") * int(item.of("num_img_tokens"))


def phi4_sound(item: MediaItem) -> str:
    """As many placeholders as the feature extractor counts (Phi-4-multimodal)."""
    return item.token("audio_token") * int(item.of("audio_embed_sizes"))


def nemotron_image(item: MediaItem) -> str:
    """A placeholder for each square of patches, between two tokens (Nemotron Omni)."""
    side = round(1 / float(item.extractor.downsample_ratio))
    soft = item.token("image_token") * (prod(map(int, item.of("image_grid_hw"))) // side**2)
    return item.token("image_start_token") + soft + item.token("image_end_token")


def nemotron_sound(item: MediaItem) -> str:
    """A placeholder for what three convolutions with stride 2 leave of the frames and one more, between two tokens
    (Nemotron Omni)."""
    count = int(halved(_frames(item) + 1, 3))
    return item.token("audio_start_token") + item.token("audio_token") * count + item.token("audio_end_token")


def framed(begin: str, end: str, count: int, *, kind: str = "image", key: str = "image_seq_length") -> ItemWriter:
    """Returns a writer of as many placeholders as the processor's setting `key` says, `count` by default, between two
    tokens; a name may be empty, and text such as newlines stands around it."""

    def write(item: MediaItem) -> str:
        return item.token(begin) + item.token(f"{kind}_token") * item.number(key, count) + item.token(end)

    return write


def as_the_processor(item: MediaItem) -> str:
    """As many placeholders as the settings of the image processor say (PaliGemma)."""
    return item.token("image_token") * int(item.extractor.image_seq_length)


def in_paragraph(write: ItemWriter) -> ItemWriter:
    """Returns a writer that puts what another one writes between blank lines."""
    return lambda item: f"\n\n{write(item)}\n\n"


GEMMA_IMAGE = in_paragraph(framed("boi_token", "eoi_token", 256))


def gemma4(item: MediaItem) -> str:
    """As many placeholders as the image processor pools patches to."""
    soft = item.token("image_token") * int(item.of("num_soft_tokens_per_image"))
    return item.token("boi_token") + soft + item.token("eoi_token")


def gemma4_sound(item: MediaItem) -> str:
    """A placeholder for each of the frames that two convolutions with stride 2 leave."""
    frames = int(item.of("input_features_mask")[::2][::2].sum())
    return item.token("boa_token") + item.token("audio_token") * frames + item.token("eoa_token")


def internvl(item: MediaItem) -> str:
    """Placeholders of all tiles, one after the other."""
    tiles = int(item.of("num_patches")) * item.number("image_seq_length", 256)
    return item.token("start_image_token") + item.token("context_image_token") * tiles + item.token("end_image_token")


def aya(item: MediaItem) -> str:
    """Tiles with their numbers, then the whole image."""
    tiles, side = int(item.of("num_patches")), item.number("patch_size", 28) * item.number("downsample_factor", 1)
    soft = item.token("img_patch_token") * (item.number("img_size", 364) // side) ** 2
    text = "".join(f"{item.token('tile_token')}_{number}{soft}" for number in range(1, tiles))
    whole = item.token("tile_global_token") + soft
    return item.token("start_of_img_token") + text + whole + item.token("end_of_img_token")


def command_a(item: MediaItem) -> str:
    """All tiles, each ended by a token."""
    tile = item.token("image_token") * int(item.extractor.patch_size) ** 2 + item.token("img_line_break_token")
    return item.token("boi_token") + tile * int(item.of("num_patches")) + item.token("eoi_token")


def _patch(item: MediaItem) -> int:
    """Returns the pixels of a side of a patch.

    Raises:
        ConfigError: no file says it.
    """
    pixels = item.number("patch_size", item.vision.get("patch_size", 0))
    if pixels < 1:
        raise ConfigError("neither processor_config.json nor vision_config of config.json has a patch_size")
    return pixels


def merged_patch(item: MediaItem) -> int:
    """Returns the pixels of a side of a merged patch."""
    return _patch(item) * item.number("spatial_merge_size", item.config.get("spatial_merge_size", 1))


def pixtral(item: MediaItem) -> str:
    """A row of merged patches after the other, each ended by a token."""
    side = merged_patch(item)
    h, w = (int(size) // side for size in item.of("image_sizes"))
    row = item.token("image_token") * w
    return item.token("image_break_token").join([row] * h) + item.token("image_end_token")


def lighton(item: MediaItem) -> str:
    """A placeholder for each merged patch."""
    side = _patch(item) * item.number("spatial_merge_size", item.config.get("spatial_merge_size", 2))
    return item.token("image_token") * prod(int(size) // side for size in item.of("image_sizes"))


def _tiles(rows: int, columns: int, around: str, soft: str) -> str:
    """Tiles by row and column, each row on a line."""
    tiles = (
        (f"{around}<row_{row}_col_{column}>{soft}" for column in range(1, columns + 1)) for row in range(1, rows + 1)
    )
    return "".join("".join(row) + "\n" for row in tiles)


def idefics3(item: MediaItem) -> str:
    """Tiles by row and column, then the whole image."""
    rows, columns = (int(item.features[name][0][item.index]) for name in ("rows", "cols"))  # by prompt
    around = item.token("fake_image_token")
    soft = item.token("image_token") * item.number("image_seq_len", 169)
    text = _tiles(rows, columns, around, soft)
    return (f"{text}\n" if text else "") + f"{around}{item.token('global_image_token')}{soft}{around}"


def llama4(item: MediaItem) -> str:
    """Tiles by row and column with separators, then the whole image."""
    side = [int(size) // _patch(item) for size in item.features["pixel_values"][0].shape[-2:]]
    soft = item.token("patch_token") * int(prod(side) * item.setting("pixel_shuffle_ratio", 0.5) ** 2)
    rows, columns = (int(count) for count in item.of("aspect_ratios"))
    row = item.token("tile_x_separator_token").join([soft] * columns) + item.token("tile_y_separator_token")
    tiles = row * rows if rows * columns > 1 else ""
    begin, end = item.token("start_of_image_token"), item.token("end_of_image_token")
    return f"{begin}{tiles}{item.token('image_token')}{soft}{end}"


def _class_tokens(item: MediaItem) -> int:
    """Returns how many features an image has beside its patches: a class token, unless it is dropped."""
    strategy = item.setting("vision_feature_select_strategy", item.config.get("vision_feature_select_strategy"))
    has_class: int = int(item.vision.get("model_type") in ("clip_vision_model", "intern_vit"))
    return item.number("num_additional_image_tokens", has_class) - int(strategy == "default")


def llava(item: MediaItem) -> str:
    """A placeholder for each patch."""
    h, w = (int(size) // _patch(item) for size in item.of("pixel_values").shape[-2:])
    return item.token("image_token") * (h * w + _class_tokens(item))


def llava_next(item: MediaItem, rate: Fraction = Fraction(1)) -> str:
    """Placeholders of the whole image, then of the tiles' patches that show the image, each row ended by one more. Of
    the patches along a side of a tile features have a fraction."""
    Y, X = map(int, item.features["pixel_values"][0].shape[-2:])
    h, w = int(Y // _patch(item) * rate), int(X // _patch(item) * rate)
    rows, columns = _rows_and_columns(item, h, w)
    return item.token("image_token") * (h * w + rows * columns + rows + _class_tokens(item))


def granite4(item: MediaItem) -> str:
    """As `llava_next`, of windows that queries read (Granite Vision 4)."""
    given = item.setting("downsample_rate", item.config.get("downsample_rate"))
    try:
        rate = Fraction(given)
    except (TypeError, ValueError, ZeroDivisionError):
        raise ConfigError(f'downsample_rate={short(given)} is no fraction such as "4/8"') from None
    return llava_next(item, rate)


def deepseek_ocr2(item: MediaItem) -> str:
    """Placeholders of each tile, then of the whole image and of what is behind it."""
    side = 4 * item.number("patch_size", 16)
    sizes = map(int, (item.of("pixel_values").shape[-1], item.extractor.tile_size))
    whole, tile = (ceil(size / side) ** 2 for size in sizes)
    return item.token("image_token") * (whole + tile * int(item.of("num_local_patches")) + 1)


def deepseek_ocr(item: MediaItem) -> str:
    """Placeholders of all tiles together, then of the whole image, each with one behind every row of features; then one
    of what is behind the image."""
    side = 4 * item.number("patch_size", 16)
    whole, tile = (ceil(int(size) / side) for size in (item.of("pixel_values").shape[-1], item.extractor.tile_size))
    columns, rows = map(int, item.of("patches_grid")) if int(item.of("num_local_patches")) else (0, 0)
    count = whole * (whole + 1) + rows * tile * (columns * tile + 1) + 1
    return item.token("image_token") * count


def _rows_and_columns(item: MediaItem, h: int, w: int) -> tuple[int, int]:
    """Returns the rows and columns of features that show an image, of tiles of h x w features."""
    Y, X = map(int, item.features["pixel_values"][0].shape[-2:])
    height, width = map(int, item.of("image_sizes"))
    rows, columns = map(int, fitting_size(height, width, item.extractor.image_grid_pinpoints))
    shown = inside_padding(rows // Y * h, columns // X * w, height, width)
    return len(shown[0]), len(shown[1])


def onevision(item: MediaItem) -> str:
    """One image as in `llava_next`, where a large one is shrunk; of each of several images all patches and an end."""
    count = item.number("num_image_tokens", 729)
    if len(item.features["image_sizes"]) > 1:
        return item.token("image_token") * (count + 1 + _class_tokens(item))
    side = isqrt(count)
    most = str(item.setting("vision_aspect_ratio", item.config.get("vision_aspect_ratio", "anyres_max_9")))
    shown = _rows_and_columns(item, side, side)
    rows, columns = shrunk(*shown, side, int(most.removeprefix("anyres_max_")))
    return item.token("image_token") * (count + rows * columns + rows + _class_tokens(item))


def aria(item: MediaItem) -> str:
    """As many placeholders as queries that the projector has for an image of this size."""
    size = int(item.features["pixel_values"].shape[2])
    queries = item.setting("size_conversion", {"490": 128, "980": 256})[str(size)]
    return item.token("image_token") * (int(item.features["num_crops"]) * int(queries))


def granite_docling(item: MediaItem) -> str:
    """Tiles by row and column, then the whole image if there is more than one."""
    rows, columns = (int(item.features[name][0][item.index]) for name in ("rows", "cols"))  # by prompt
    fine = 4 if "tile_fine_mask" in item.features else 1
    soft = item.token("image_token") * (item.number("image_seq_len", 64) * fine)
    around = item.token("fake_image_token")
    text = _tiles(rows, columns, around, soft)
    return text + (f"\n{around}{item.token('global_image_token')}{soft}{around}" if rows * columns > 1 else "")


def lfm2(item: MediaItem) -> str:
    """Tiles by row and column, then the whole image, each with a placeholder for a block of merged patches."""
    rows, columns, extractor = int(item.of("image_rows")), int(item.of("image_cols")), item.extractor

    def soft(*sizes: int) -> str:
        patches = (int(size) // int(extractor.encoder_patch_size) for size in sizes)
        return item.token("image_token") * prod(-(-count // int(extractor.downsample_factor)) for count in patches)

    text = ""
    if rows > 1 or columns > 1:
        tile = soft(extractor.tile_size, extractor.tile_size)
        places = ((row, column) for row in range(1, rows + 1) for column in range(1, columns + 1))
        text = "".join(f"<|img_row_{row}_col_{column}|>{tile}" for row, column in places)
        if extractor.use_thumbnail:
            text += item.token("image_thumbnail_token") + soft(*item.of("image_sizes"))
    else:
        text = soft(*item.of("image_sizes"))
    return item.token("image_start_token") + text + item.token("image_end_token")


def hunyuan(item: MediaItem) -> str:
    """A placeholder for each block of merged patches and for the end of each row, and two around them."""
    side = int(item.extractor.merge_size * item.extractor.spatial_patch_size)
    _, h, w = (int(size) // side for size in item.of("image_grid_thw"))
    return item.token("image_token") * (h * (w + 1) + 2 * item.number("cat_extra_token", True))


def _frames(item: MediaItem) -> int:
    """Returns the frames of a sound, without padding."""
    mask = next(item.features[name] for name in FRAME_MASKS if name in item.features)
    pieces = item.features.get(PIECES) or [1] * len(mask)
    first = sum(pieces[: item.index])
    return int(sum(row.sum() for row in mask[first : first + pieces[item.index]]))


def qwen2_sound(item: MediaItem) -> str:
    """A placeholder for 40 ms: a convolution with stride 2, then the mean of two."""
    return item.token("audio_token") * ((int(halved(_frames(item), 1)) - 2) // 2 + 1)


def musicflamingo(item: MediaItem) -> str:
    """The placeholders of Qwen2's audio tower between two tokens."""
    return item.token("audio_bos_token") + qwen2_sound(item) + item.token("audio_eos_token")


def glm_sound(item: MediaItem) -> str:
    """A placeholder for four of what a convolution with stride 2 leaves."""
    return item.token("audio_token") * (int(halved(_frames(item), 1)) // 4)


def qwen3_sound(item: MediaItem) -> str:
    """Thirteen placeholders for each whole chunk of a second, and what three convolutions with stride 2 leave of the
    rest."""
    audio = (item.config.get("thinker_config") or item.config).get("audio_config") or {}
    size = 2 * item.number("n_window", audio.get("n_window", 50))
    chunks, rest = divmod(_frames(item), size)
    rest = int(halved(rest, 3))
    return item.token("audio_token") * (13 * chunks + rest)


def voxtral(item: MediaItem) -> str:
    """375 placeholders for each half minute, silence included."""
    return item.token("begin_audio_token") + item.token("audio_token") * (375 * int(item.of(PIECES)))
