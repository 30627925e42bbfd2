"""Texts that models write about images: the files of a release's processor, prefill in chunks, and the cache."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from helpers.processors import IMAGE_PROCESSORS, word_tokenizer
from helpers.sights import END, IMAGE, SIGHTS, START, Sight
from helpers.trainers import save_standard, trained_tree
from tpuconv import api
from tpuconv.api.opened import OpenedModel
from tpuconv.checkpoint.manifest import read_manifest
from tpuconv.cli import tpuconv
from tpuconv.commands.flags import with_flags
from tpuconv.errors import TpuconvError, UsageError
from tpuconv.models import generate, pictures

Image = pytest.importorskip("PIL.Image", reason="the image processors of transformers need Pillow")

HUNYUAN_TOKENS = {START: 100, IMAGE: 102, END: 101}
NAMES = {
    "gemma3": {IMAGE: "<image_soft_token>", START: "<start_of_image>", END: "<end_of_image>"},
    "paligemma2": {IMAGE: "<image>", 1: "<bos>"},
    "qwen3_vl": {IMAGE: "<|image_pad|>", START: "<|vision_start|>", END: "<|vision_end|>"},
    "ernie4_5_vl_moe": {IMAGE: "<|IMAGE_PLACEHOLDER|>", START: "<|IMAGE_START|>", END: "<|IMAGE_END|>"},
    "hunyuan_vl": {token: f"<｜hy_place▁holder▁no▁{number}｜>" for token, number in HUNYUAN_TOKENS.items()},
}
CHAT = (
    "{% for m in messages %}{% for part in m.content %}{% if part.type == 'image' %}MARK "
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endfor %} t7"
)
MARKS = {
    "gemma3": "<start_of_image>",
    "paligemma2": "<image>",
    "qwen3_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "ernie4_5_vl_moe": "<|IMAGE_START|><|image@placeholder|><|IMAGE_END|>",
    "hunyuan_vl": "".join(NAMES["hunyuan_vl"].values()),
}
NEW = 6


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[] if name == "qwen3_vl" else [pytest.mark.slow]) for name in NAMES],
)
def seeing(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Sight, Path, str]:
    """A model with a tokenizer, an image processor and a chat template, and its checkpoint."""
    name, folder = request.param, tmp_path_factory.mktemp(request.param)
    case, special = SIGHTS[name](), NAMES[name]
    case.model.save_pretrained(folder / "src")
    tokenizer = word_tokenizer(special, additional_special_tokens=list(special.values()))
    tokenizer.chat_template = CHAT.replace("MARK", MARKS[name])
    tokenizer.save_pretrained(folder / "src")
    IMAGE_PROCESSORS[name]().save_pretrained(folder / "src")
    (folder / "src" / "processor_config.json").write_text('{"image_seq_length": 9}')
    api.convert(folder / "src", folder / "out")
    return case, folder / "out", name


@pytest.fixture
def images(tmp_path: Path) -> list[Path]:
    """Two pictures of different sizes."""
    rng, paths = np.random.default_rng(0), []
    for number, size in enumerate(((30, 45, 3), (52, 20, 3))):
        paths.append(tmp_path / f"{number}.png")
        Image.fromarray(rng.integers(0, 255, size, dtype=np.uint8)).save(paths[-1])
    return paths


def expected(case: Sight, ids: list[int], features: Any) -> list[int]:
    """The most likely tokens by transformers, which computes all again for each."""
    prompt = len(ids)
    for _ in range(NEW):
        ids_BT = np.array([ids])
        ids = [*ids, int(case.reference(ids_BT, np.ones_like(ids_BT, bool), features, prompt)[0, -1].argmax())]
    return ids[-NEW:]


def test_texts_about_images_are_those_of_transformers(seeing, images, monkeypatch):
    case, out, name = seeing
    monkeypatch.setattr(generate, "PREFILL_TOKENS", 8)  # an image is longer than a chunk
    generator = api.generator(out)
    for chat in (False, True):
        ids, features = generator.encoder.encode_with("t5 t9", images, chat=chat)
        is_any_size = "image_grid_thw" in features
        assert ids.count(IMAGE) > 8 if is_any_size else ids.count(IMAGE) == len(features["pixel_values"]) * 9
        assert name != "paligemma2" or ids.index(1) > ids.index(IMAGE)
        [found] = generator(["t5 t9"], NEW, images=images, chat=chat)
        assert list(found.ids) == expected(case, ids, features)
    [alone], [other] = generator(["t5 t9"], NEW), generator(["t5 t9"], NEW, images=images[:1])
    assert alone.ids != other.ids
    with pytest.raises(UsageError, match="images are of type PosixPath"):
        generator(["t5"], NEW, images=images[0])


@pytest.mark.slow
def test_a_run_of_a_model_on_the_hub_sees(seeing, images, tmp_path, serve_hub):
    """Its processor is read when the temporary folder of the model is gone."""
    _, out, _ = seeing
    serve_hub({"org/sees": out.parent / "src"})
    save_standard(tmp_path / "run", trained_tree(out))
    generator = api.generator(tmp_path / "run", config="org/sees")
    assert generator(["t5 t9"], NEW, images=images) == api.generator(out)(["t5 t9"], NEW, images=images)


def test_the_command_takes_files(seeing, images):
    _, out, name = seeing

    def run(prompt: str, *more: str) -> Any:
        arguments = ["generate", str(out), "--prompt", prompt, "--image", str(images[0]), *more]
        return CliRunner().invoke(tpuconv, [*arguments, "--max-new-tokens", "2", "--json"])

    assert len(json.loads(run("t5").stdout)["ids"]) == 2
    assert "2 markers" in str(run(f"{MARKS[name]} t5 {MARKS[name]}").exception)
    assert "one prompt" in str(run("t5", "--prompt", "t6").exception)


def test_the_command_prepares_images_once(seeing, images, monkeypatch):
    """A large image takes seconds; config.json is read once for all that is asked of it."""
    _, out, _ = seeing
    prepared, read = [], []
    of_images, read_json = pictures._of_images, pictures.read_json
    monkeypatch.setattr(pictures, "_of_images", lambda *args: prepared.append(args) or of_images(*args))
    monkeypatch.setattr(pictures, "read_json", lambda path, *more: read.append(path.name) or read_json(path, *more))
    arguments = ["generate", str(out), "--prompt", "t5 t9", "--image", str(images[0]), "--max-new-tokens", "2"]
    assert CliRunner().invoke(tpuconv, arguments).exit_code == 0
    assert len(prepared) == 1
    assert read.count("config.json") == 1


def test_placeholders_without_an_image_are_refused_before_weights_are_read(seeing, images, monkeypatch):
    """By transformers most models run them as text."""
    _, out, name = seeing
    monkeypatch.setattr(OpenedModel, "load_on_all_devices", None)
    mark, placeholder = MARKS[name], NAMES[name][IMAGE]

    def error(prompt: str, *more: Any) -> TpuconvError:
        done = CliRunner().invoke(tpuconv, ["generate", str(out), *more, "--prompt", prompt])
        assert isinstance(done.exception, TpuconvError), done.exception
        return done.exception

    for more in ((), ("--chat",)):
        for prompt in (f"t5 {placeholder}", f"{mark} t5"):
            found = error(prompt, *more)
            assert "which stands for an image, and no image is given" in found.message
            assert with_flags(found.hint).startswith("give --image FILE, or leave <")
    if placeholder not in mark and name != "ernie4_5_vl_moe":  # whose placeholder is a marker too
        found = error(f"{mark} t5 {placeholder}", "--image", str(images[0]))
        assert found.message == f"the prompt has {placeholder}, a placeholder of one feature of an image"
        assert found.hint == f"leave it out, or write {mark}, which stands for the whole image"


def test_a_text_model_alone_does_not_see(seeing, images, tmp_path):
    _, out, _ = seeing
    api.convert(out.parent / "src", tmp_path / "text", text_only=True)
    with pytest.raises(UsageError, match="no part that sees"):
        api.generator(tmp_path / "text")(["t5"], 2, images=images)


RULES = """
qwix: {rules: [{module_path: 'layers/.*mlp/.*', weight_qtype: int4, tile_size: 16}]}
calibration: {method: gptq}
"""


@pytest.mark.slow
def test_a_model_is_calibrated_on_prompts_with_images(seeing, images, tmp_path):
    out = seeing[1]
    (tmp_path / "mine.yaml").write_text(RULES)
    file = tmp_path / "prompts.jsonl"

    def quantize(*prompts: dict[str, Any], length: int = 64) -> dict[str, Any]:
        file.write_text("".join(f"{json.dumps(prompt)}\n" for prompt in prompts))
        api.quantize(
            out, tmp_path / "q", config=tmp_path / "mine.yaml", calibration=file, length=length, overwrite=True
        )
        manifest = read_manifest(tmp_path / "q")
        return manifest.quantization["calibration_data"] | {"arrays": [x.xxh3 for x in manifest.arrays.values()]}

    about_image, text = {"prompt": "t5 t9", "images": [images[0].name], "chat": True}, {"prompt": "t4 t8"}
    seen = quantize(about_image, text)
    assert (seen["text"], seen["samples"], seen["length"]) == ("prompts.jsonl", 2, 64)
    other = quantize({**about_image, "images": [images[1].name]}, text)
    alone = quantize({"prompt": "t5 t9", "chat": False}, text)
    assert seen == quantize(about_image, text)
    assert len({each["xxh3_128"] for each in (seen, other, alone)}) == 3
    assert len({str(each["arrays"]) for each in (seen, other, alone)}) == 3
    for wrong, fault in (
        ({"prompt": "t5", "image": "0.png"}, "line 1 of .*image"),
        ({"prompt": "t5", "images": ["absent.png"]}, "absent.png"),
        ({"prompt": "t5", "images": ["https://a.b/c.png"]}, "https://a.b/c.png cannot be used"),
        ({"images": []}, "line 1 of .*prompt must be a text"),
    ):
        with pytest.raises(UsageError, match=fault):
            quantize(wrong)
    with pytest.raises(UsageError, match=r"line 2 of .* has \d+ tokens with its images"):
        quantize(text, about_image, length=8)
