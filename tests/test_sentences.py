"""Vectors of texts, by the modules after a model."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from helpers.checkpoints import read_tensors
from helpers.commands import EXAMPLE
from helpers.families import BY_ID, save
from helpers.oracles import installed_beside
from tpuconv import api
from tpuconv.errors import ConfigError, SourceError, UnsupportedConfig, UsageError

TEXTS = ["a quick test", "the longest text of all of these " * 30, "b", *(f"text {n}" for n in range(33))]
SENTENCE_TRANSFORMERS = (
    *("sentence-transformers==6.2.0", "scikit-learn", "joblib", "threadpoolctl", "cloudpickle", "narwhals"),
)
ALL_POOLS = ["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean"]
MODELS: dict[str, dict[str, Any]] = {
    "qwen3-tied": {"pools": ["lasttoken"], "dense": [], "include_prompt": True},
    # As EmbeddingGemma: it attends both ways, and has two dense layers.
    "gemma3_text-released": {"pools": ["mean"], "dense": [33, 20], "include_prompt": False},
    "qwen2-plain": {"pools": ALL_POOLS, "dense": [], "include_prompt": True},
}


def embedding_model(name: str, folder: Path) -> Path:
    """Writes the model of a case without a head, with the tokenizer of the example, and returns the folder."""
    import torch
    import transformers

    save(BY_ID[name], folder / "hf")
    tokenizer = transformers.AutoTokenizer.from_pretrained(EXAMPLE)
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(0)
    config = transformers.AutoConfig.from_pretrained(folder / "hf")
    config.vocab_size, config.max_position_embeddings = len(tokenizer) + 3, 128
    if "gemma3" in name:
        config.use_bidirectional_attention = True
    torch.manual_seed(0)
    model = transformers.AutoModel.from_config(config)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.2)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return folder / "model"


@pytest.mark.slow
@pytest.mark.oracles
def test_vectors_are_those_of_sentence_transformers(tmp_path: Path) -> None:
    path = installed_beside("sentence-transformers", *SENTENCE_TRANSFORMERS)
    requests = [
        {"model": str(embedding_model(name, tmp_path / name)), "out": str(tmp_path / f"{name}-st"), "texts": TEXTS}
        | request
        for name, request in MODELS.items()
    ]
    subprocess.run(
        [sys.executable, Path(__file__).parent / "helpers" / "sentence_vectors.py"],
        input=json.dumps(requests).encode(),
        env={"PYTHONPATH": str(path), "HF_HUB_OFFLINE": "1"},
        check=True,
    )
    for name in MODELS:
        source = tmp_path / f"{name}-st"
        with np.load(tmp_path / f"{name}-st.npz") as arrays:
            expected = dict(arrays)
        api.convert(source, tmp_path / f"{name}-out")
        for place in (source, tmp_path / f"{name}-out"):
            embedder = api.embedder(place)
            for prompt in (None, "query", "document"):
                found = embedder(TEXTS, prompt=prompt)
                np.testing.assert_allclose(found, expected[str(prompt)], atol=2e-6, err_msg=f"{name} {prompt}")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without a head, its last token pooled, and a dense layer."""
    folder = embedding_model("qwen3-tied", tmp_path_factory.mktemp("sentences"))
    modules = ["Transformer", "Pooling", "Dense", "Normalize"]
    listed = [{"path": f"{i}_{kind}" if i else "", "type": f"some.{kind}"} for i, kind in enumerate(modules)]
    (folder / "modules.json").write_text(json.dumps(listed))
    for each in listed[1:]:
        (folder / each["path"]).mkdir()
    (folder / "1_Pooling/config.json").write_text('{"pooling_mode_lasttoken": true, "pooling_mode_cls_token": false}')
    width = json.loads((folder / "config.json").read_text())["hidden_size"]
    kernel = np.random.default_rng(0).normal(size=(5, width)).astype("f4")
    (folder / "2_Dense/config.json").write_text(json.dumps({"in_features": width, "out_features": 5}))
    save_file({"linear.weight": kernel, "linear.bias": np.ones(5, "f4")}, folder / "2_Dense/model.safetensors")
    return folder


def test_the_last_token_goes_through_a_dense_layer(model: Path, tmp_path: Path) -> None:
    import torch
    import transformers

    api.convert(model, tmp_path / "out")
    embedder = api.embedder(tmp_path / "out")
    dense = read_tensors(model / "2_Dense")
    reference = transformers.AutoModel.from_pretrained(model)
    for text, found in zip(TEXTS[:1], embedder(TEXTS[:1]), strict=True):
        ids = embedder.tokenizer(text)["input_ids"]
        with torch.no_grad():
            last = reference(torch.tensor([ids])).last_hidden_state[0, -1].numpy()
        y = np.tanh(dense["linear.weight"] @ last + dense["linear.bias"])
        np.testing.assert_allclose(found, y / np.linalg.norm(y), atol=2e-6)
    np.testing.assert_allclose(embedder(TEXTS[:3])[0], embedder(TEXTS[:1])[0], atol=2e-6)
    assert embedder([]).shape[0] == 0
    with pytest.raises(UsageError, match="has no prompt 'query'"):
        embedder(["a"], prompt="query")
    with pytest.raises(UsageError, match="single text"):
        embedder("a")
    with pytest.raises(UsageError, match="'' has no tokens"):
        embedder(["a", ""])


@pytest.mark.parametrize(
    ("shapes", "message"), [([(5, 7), 5], "of 7 numbers"), ([(5,), 5], "the shape"), ([(5, 7), 4], "the shape")]
)
def test_a_dense_layer_that_does_not_fit_is_named(shapes, message, model, tmp_path):
    api.convert(model, tmp_path / "out")
    kernel, bias = (np.ones(shape, "f4") for shape in shapes)
    save_file({"linear.weight": kernel, "linear.bias": bias}, tmp_path / "out/2_Dense/model.safetensors")
    with pytest.raises(ConfigError, match=message):
        api.embedder(tmp_path / "out")(["a"])


@pytest.mark.parametrize(
    ("file", "text", "error", "message"),
    [
        ("modules.json", '[{"path": "", "type": "a.Transformer"}]', UnsupportedConfig, "lists the modules"),
        ("modules.json", "{}", ConfigError, "must be"),
        ("modules.json", '[{"path": "../1_Pooling", "type": "a.Transformer"}]', SourceError, "is no folder inside"),
        ("1_Pooling/config.json", '{"pooling_mode": "best"}', UnsupportedConfig, "is not one of"),
        ("2_Dense/config.json", '{"activation_function": "os.system"}', UnsupportedConfig, "not implemented"),
        ("2_Dense/model.safetensors", "", ConfigError, "no readable linear.weight"),
    ],
)
def test_modules_that_are_not_implemented_are_named(file, text, error, message, model, tmp_path):
    api.convert(model, tmp_path / "out")
    (tmp_path / "out" / file).write_text(text)
    with pytest.raises(error, match=message):
        api.embedder(tmp_path / "out")


def test_models_without_modules_and_language_models_are_refused(model: Path, tmp_path: Path) -> None:
    api.convert(model, tmp_path / "out")
    (tmp_path / "out" / "modules.json").unlink()
    with pytest.raises(UsageError, match=r"no modules\.json"):
        api.embedder(tmp_path / "out")
    with pytest.raises(UsageError, match="returns logits, not hidden states"):
        api.embedder(EXAMPLE)
