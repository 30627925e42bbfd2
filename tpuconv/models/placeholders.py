"""The texts that the processors of releases write for images and sounds. A prompt has a marker for each; instead of it
the text has a placeholder for each feature, and tokens that frame them. A row for each type of model.

transformers' processors of many models do not load without torchvision, which their videos need; nothing here does."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from tpuconv.errors import ConfigError
from tpuconv.jsonfile import Optional, Range

IMAGE, SOUND = "image", "sound"
PIECES = "pieces"
"""The number of pieces that each sound is cut into."""

FEW, NONE_OR_FEW = Optional((Range(1, 1 << 20), None)), Optional((Range(0, 1 << 20), None))
PROCESSOR_KEYS = {
    **dict.fromkeys(("image_seq_length", "image_seq_len", "num_image_tokens", "audio_seq_length"), FEW),
    **dict.fromkeys(("patch_size", "spatial_merge_size", "n_window"), FEW),
    "num_additional_image_tokens": NONE_OR_FEW,
    "vision_feature_select_strategy": Optional((str, None)),
    "pixel_shuffle_ratio": Optional((float, None)),
    "cat_extra_token": Optional((bool, None)),
}
"""The schema of processor_config.json: only these keys are read."""


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


@dataclass(frozen=True)
class Placeholder:
    """How one kind of image or sound is written.

    Attributes:
        write: returns the text that stands in place of the marker.
        tokens: the special tokens that it is made of, unless the tokenizer gives another one under the same name. The
            first is the marker.
        call: arguments of the image processor or feature extractor, which go before its settings.
        renamed: features that the model takes under another name.
        frames: the features of a sound are cut into pieces of so many frames; None where they are not.
    """

    write: ItemWriter
    tokens: Mapping[str, str]
    call: Mapping[str, Any] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    frames: int | None = None

    @property
    def marker(self) -> str:
        """The name of the token that stands for an image or sound in a prompt."""
        return next(iter(self.tokens))


def by_grid(item: MediaItem) -> str:
    """A placeholder for each block of merged patches (Qwen-VL and others)."""
    patches = prod(map(int, item.of("image_grid_thw")))
    return item.token("image_token") * (patches // int(item.extractor.merge_size) ** 2)


def framed(begin: str, end: str, count: int, *, kind: str = "image", key: str = "image_seq_length") -> ItemWriter:
    """Returns a writer of as many placeholders as the processor's setting `key` says, `count` by default, between two
    tokens; a name may be empty, and text such as newlines stands around it."""

    def write(item: MediaItem) -> str:
        return item.token(begin) + item.token(f"{kind}_token") * item.number(key, count) + item.token(end)

    return write


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


def _patch(item: MediaItem) -> int:
    """Returns the pixels of a side of a patch.

    Raises:
        ConfigError: no file says it.
    """
    pixels = item.number("patch_size", item.vision.get("patch_size", 0))
    if pixels < 1:
        raise ConfigError("neither processor_config.json nor vision_config of config.json has a patch_size")
    return pixels


def pixtral(item: MediaItem) -> str:
    """A row of merged patches after the other, each ended by a token."""
    side = _patch(item) * item.number("spatial_merge_size", item.config.get("spatial_merge_size", 1))
    h, w = (int(size) // side for size in item.of("image_sizes"))
    row = item.token("image_token") * w
    return item.token("image_break_token").join([row] * h) + item.token("image_end_token")


def lighton(item: MediaItem) -> str:
    """A placeholder for each merged patch."""
    side = _patch(item) * item.number("spatial_merge_size", item.config.get("spatial_merge_size", 2))
    return item.token("image_token") * prod(int(size) // side for size in item.of("image_sizes"))


def idefics3(item: MediaItem) -> str:
    """Tiles by row and column, then the whole image."""
    rows, columns = (int(item.features[name][0][item.index]) for name in ("rows", "cols"))  # by prompt
    around = item.token("fake_image_token")
    soft = item.token("image_token") * item.number("image_seq_len", 169)
    text = ""
    for row in range(1, rows + 1):
        text += "".join(f"{around}<row_{row}_col_{column}>{soft}" for column in range(1, columns + 1)) + "\n"
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


def llava_next(item: MediaItem) -> str:
    """Placeholders of the whole image, then of the tiles' patches that show the image, each row ended by one more."""
    Y, X = map(int, item.features["pixel_values"][0].shape[-2:])
    h, w = Y // _patch(item), X // _patch(item)
    height, width = map(int, item.of("image_sizes"))
    rows, columns = best_tiles(height, width, item.extractor.image_grid_pinpoints)
    rows, columns = unpadded(height, width, rows // Y * h, columns // X * w)
    return item.token("image_token") * (h * w + rows * columns + rows + _class_tokens(item))


def best_tiles(height: int, width: int, sizes: Any) -> tuple[int, int]:
    """Returns the size of tiles that shows most pixels of an image, of these the one with least beside it."""

    def shown(size: Any) -> tuple[int, int]:
        scale = min(size[1] / width, size[0] / height)
        pixels = min(int(width * scale) * int(height * scale), width * height)
        return pixels, pixels - size[0] * size[1]

    rows, columns = max(sizes, key=shown)
    return int(rows), int(columns)


def unpadded(height: int, width: int, rows: int, columns: int) -> tuple[int, int]:
    """Returns rows and columns of patches that show an image, whose tiles have padding on two sides."""
    if width / height > columns / rows:
        return rows - (rows - int(round(height * (columns / width), 7))) // 2 * 2, columns
    return rows, columns - (columns - int(round(width * (rows / height), 7))) // 2 * 2


def hunyuan(item: MediaItem) -> str:
    """A placeholder for each block of merged patches and for the end of each row, and two around them."""
    side = int(item.extractor.merge_size * item.extractor.spatial_patch_size)
    _, h, w = (int(size) // side for size in item.of("image_grid_thw"))
    return item.token("image_token") * (h * (w + 1) + 2 * item.number("cat_extra_token", True))


def _frames(item: MediaItem, mask: str = "feature_attention_mask") -> int:
    """Returns the frames of a sound, without padding."""
    return int(item.of(mask).sum())


def qwen2_sound(item: MediaItem) -> str:
    """A placeholder for 40 ms: a convolution with stride 2, then the mean of two."""
    return item.token("audio_token") * (((_frames(item) - 1) // 2 + 1 - 2) // 2 + 1)


def qwen3_sound(item: MediaItem) -> str:
    """Thirteen placeholders for each whole chunk of a second, and what three convolutions with stride 2 leave of the
    rest."""
    audio = (item.config.get("thinker_config") or item.config).get("audio_config") or {}
    size = 2 * item.number("n_window", audio.get("n_window", 50))
    chunks, rest = divmod(_frames(item), size)
    for _ in range(3):
        rest = (rest - 1) // 2 + 1
    return item.token("audio_token") * (13 * chunks + rest)


def voxtral(item: MediaItem) -> str:
    """375 placeholders for each half minute, silence included."""
    return item.token("begin_audio_token") + item.token("audio_token") * (375 * int(item.of(PIECES)))


def _row(write: ItemWriter, **tokens: str) -> Placeholder:
    return Placeholder(write, tokens)


QWEN_IMAGE = _row(by_grid, image_token="<|image_pad|>")
GLM_IMAGE = _row(by_grid, image_token="<|image|>")
LLAVA_TOKEN = {"image_token": "<image>"}
PIXTRAL_TOKENS = {"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"}
INTERNVL_TOKENS = {
    "context_image_token": "<IMG_CONTEXT>",
    "start_image_token": "<img>",
    "end_image_token": "</img>",
}
IDEFICS_IMAGE = Placeholder(
    idefics3,
    LLAVA_TOKEN | {"fake_image_token": "<fake_token_around_image>", "global_image_token": "<global-img>"},
    call={"return_row_col_info": True},
)
DEEPSEEK_IMAGE = _row(framed("", "", 576, key="num_image_tokens"), image_token="<image_placeholder>")
GEMMA_TOKENS = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
MASKED = {"return_attention_mask": True, "padding": "max_length"}
MASK = {"attention_mask": "feature_attention_mask"}

PLACEHOLDERS: Mapping[tuple[str, str], Placeholder] = {
    ("gemma3", IMAGE): Placeholder(
        GEMMA_IMAGE,
        {"boi_token": GEMMA_TOKENS["boi_token"]} | GEMMA_TOKENS,
        call={"do_convert_rgb": True, "do_pan_and_scan": False},
    ),
    ("gemma3n", IMAGE): Placeholder(GEMMA_IMAGE, GEMMA_TOKENS),
    ("gemma3n", SOUND): _row(
        in_paragraph(framed("boa_token", "eoa_token", 188, kind="audio", key="audio_seq_length")),
        audio_token="<audio_soft_token>",
        boa_token="<start_of_audio>",
        eoa_token="<end_of_audio>",
    ),
    ("gemma4", IMAGE): _row(gemma4, image_token="<|image|>", boi_token="<|image>", eoi_token="<image|>"),
    ("gemma4", SOUND): _row(gemma4_sound, audio_token="<|audio|>", boa_token="<|audio>", eoa_token="<audio|>"),
    **{
        (name, IMAGE): QWEN_IMAGE
        for name in (
            *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "qwen4_exp"),
            *("qwen3_omni_moe", "exaone4_5", "hyperclovax_vision_v2", "video_llama_3", "cosmos3_edge"),
        )
    },
    ("qwen2_5_omni", IMAGE): _row(by_grid, image_token="<|IMAGE|>"),
    ("qwen2_5_omni", SOUND): Placeholder(qwen2_sound, {"audio_token": "<|AUDIO|>"}, MASKED, MASK),
    ("qwen2_audio", SOUND): Placeholder(qwen2_sound, {"audio_token": "<|AUDIO|>"}, MASKED, MASK),
    ("qwen3_omni_moe", SOUND): Placeholder(
        qwen3_sound,
        {"audio_token": "<|audio_pad|>"},
        {"return_attention_mask": True, "padding": True, "truncation": False},
        MASK,
    ),
    **{(name, IMAGE): GLM_IMAGE for name in ("glm4v", "glm4v_moe", "glm46v", "glm_ocr", "glm5_next")},
    ("cohere_compass", IMAGE): _row(by_grid, image_token="<|IMAGE_PAD|>"),
    ("paddleocr_vl", IMAGE): _row(by_grid, image_token="<|IMAGE_PLACEHOLDER|>"),
    ("kimi_k25", IMAGE): _row(by_grid, image_token="<|media_pad|>"),
    ("hunyuan_vl", IMAGE): _row(hunyuan, image_token=""),
    ("llava", IMAGE): Placeholder(llava, LLAVA_TOKEN),
    ("vipllava", IMAGE): Placeholder(llava, LLAVA_TOKEN),
    ("llava_next", IMAGE): Placeholder(llava_next, LLAVA_TOKEN, call={"do_pad": True}),
    ("pixtral", IMAGE): Placeholder(pixtral, PIXTRAL_TOKENS),
    ("lighton_ocr", IMAGE): Placeholder(lighton, PIXTRAL_TOKENS, call={"do_pad": True}),
    ("internvl", IMAGE): Placeholder(internvl, INTERNVL_TOKENS, call={"crop_to_patches": True}),
    ("qianfan_ocr", IMAGE): Placeholder(
        internvl, {"image_placeholder_token": "<image>"} | INTERNVL_TOKENS, call={"crop_to_patches": True}
    ),
    ("idefics3", IMAGE): IDEFICS_IMAGE,
    ("smolvlm", IMAGE): IDEFICS_IMAGE,
    ("llama4", IMAGE): Placeholder(
        llama4,
        {
            **{"image_token": "<|image|>", "patch_token": "<|patch|>"},
            **{"start_of_image_token": "<|image_start|>", "end_of_image_token": "<|image_end|>"},
            "tile_x_separator_token": "<|tile_x_separator|>",
            "tile_y_separator_token": "<|tile_y_separator|>",
        },
        call={"return_tensors": "pt"},  # otherwise tiles are not one after the other
    ),
    ("deepseek_vl", IMAGE): DEEPSEEK_IMAGE,
    ("deepseek_vl_hybrid", IMAGE): DEEPSEEK_IMAGE,
    ("janus", IMAGE): _row(
        framed("boi_token", "eoi_token", 576, key="num_image_tokens"),
        image_token="<image_placeholder>",
        boi_token="<begin_of_image>",
        eoi_token="<end_of_image>",
    ),
    ("voxtral", SOUND): Placeholder(
        voxtral,
        {"audio_token": "[AUDIO]", "begin_audio_token": "[BEGIN_AUDIO]"},
        {"padding": True, "truncation": False, "pad_to_multiple_of": 480_000},
        frames=3000,
    ),
}
"""By type of model, and image or sound."""


def placeholder_of(config: Mapping[str, Any], kind: str) -> Placeholder | None:
    """Returns how a model writes an image or a sound, by its config.json; None if that is not known. Models that see
    through Pixtral write images as it does, except LightOnOCR, which writes no ends of rows."""
    name, vision = config.get("model_type"), config.get("vision_config") or {}
    if kind == IMAGE and vision.get("model_type") == "pixtral" and name != "lighton_ocr":
        name = "pixtral"
    return PLACEHOLDERS.get((str(name), kind))
