"""The models of the newest MaxText, Tunix and library gemma, beside the families of our targets: a new model of theirs
has a table, or a reason why not. Slow: it downloads the packages, and installs nothing."""

import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator

import pytest

from helpers.oracles import FOLDER
from tpuconv.targets.registry import get_target

pytestmark = [pytest.mark.slow, pytest.mark.oracles]

LISTED = {
    "maxtext": {
        r"gemma2-\d+b": "gemma2",
        r"gemma3-\d+b": "gemma3",
        r"gemma4-(\d+b|e\db)": "gemma4",
        r"qwen2\.5-[\d.]+b": "qwen2",
        r"qwen3-[\d.]+b(-base|-thinking-2507)?": "qwen3",
        r"qwen3-(coder-)?\d+b-a\d+b(-base)?": "qwen3_moe",
        r"qwen3-vl-\d+b": "qwen3_vl",
        r"qwen3-vl-\d+b-a\d+b": "qwen3_vl_moe",
        r"qwen3-omni-30b-a3b": "qwen3_omni_moe",
        r"qwen3-next-80b-a3b": "qwen3_next",
        r"qwen3\.5-\d+b(-a\d+b)?(-fp8)?": "qwen3_5_moe",
        r"llama3\.1-\d+b(-Instruct)?": "llama",
        r"deepseek2-\d+b": "deepseek_v2",
        r"deepseek3-\d+b": "deepseek_v3",
        r"deepseek3\.2-\d+b": "deepseek_v32",
        r"deepseek4-284b": "deepseek_v4",
        r"weaver-(mini|max)": None,  # transformers has no such model
        r"gpt-oss-\d+b": "gpt_oss",
        r"mixtral-8x\d+b": "mixtral",
        r"olmo3-\d+b(-pt)?": "olmo3",
    },
    "tunix": {
        "gemma": "gemma2",
        "gemma3": "gemma3",
        "gemma4": "gemma4",
        "llama3": "llama",
        "qwen2": "qwen2",
        "qwen3": "qwen3_moe",
    },
    "gemma": {
        r"Gemma2_\d+B": "gemma2",
        r"Gemma3_\d+[MB]": "gemma3",
        r"Gemma3n_E\dB": "gemma3n",
        r"Gemma4_(E\dB|\d+B|26B_A4B)": "gemma4",
    },
}
"""Of each program the names of its models, and the family that reads them. `None` has no table: docs/targets.md."""
PACKAGES = {"maxtext": "maxtext", "tunix": "google-tunix", "gemma": "gemma"}


def wheel(package: str) -> zipfile.ZipFile:
    """The newest release of a package; skips the test if it cannot be fetched."""
    folder = FOLDER / "newest"
    for old in folder.glob(f"{package.replace('-', '_')}-*.whl"):
        old.unlink()
    options = ["--quiet", "--no-deps", "--only-binary=:all:", "--python-version=3.12", f"--dest={folder}"]
    command = [sys.executable, "-m", "pip", "download", *options, package]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"{package} cannot be fetched: {done.stderr[-300:]}")
    return zipfile.ZipFile(next(folder.glob(f"{package.replace('-', '_')}-*.whl")))


def models_of(program: str, files: zipfile.ZipFile) -> Iterator[str]:
    """The names of the models of a program: the keys of MaxText's mappings, Tunix's folders, the classes of gemma."""
    if program == "tunix":
        yield from {
            found[1] for name in files.namelist() if (found := re.match(r"tunix/models/(\w+)/model\.py$", name))
        }
    elif program == "maxtext":
        text = files.read("maxtext/checkpoint_conversion/utils/param_mapping.py").decode()
        yield from re.findall(r'^ +"(.+?)":', re.search(r"^PARAM_MAPPING = {(.+?)^}", text, re.M | re.S)[1], re.M)
    else:
        for name in files.namelist():
            if name.startswith("gemma/gm/nn/") and re.search(r"/_gemma\w*\.py$", name):
                yield from re.findall(r"^class (Gemma\w+)\(", files.read(name).decode(), re.M)


@pytest.mark.parametrize("program", PACKAGES)
def test_every_model_of_a_program_has_a_table_or_a_reason(program):
    listed = LISTED[program]
    with wheel(PACKAGES[program]) as files:
        models = sorted(models_of(program, files))
    patterns = {model: [each for each in listed if re.fullmatch(each, model)] for model in models}
    assert not {model: found for model, found in patterns.items() if len(found) != 1}
    assert {found for each in patterns.values() for found in each} == listed.keys()
    assert {family for family in listed.values() if family} <= get_target(program).trees.keys()
