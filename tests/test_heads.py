"""Models without logits: classifiers, which return scores, and embedding models, which return hidden states."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as OF_TEXTS
from transformers.models.auto.modeling_auto import MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES as OF_TOKENS

import tpuconv
from helpers import released_code
from helpers.checkpoints import qwen3_config, random_checkpoint, read_tensors, write_checkpoint
from helpers.conversions import assert_same, convert, plan_for
from helpers.encoded import same_bits
from helpers.families import BY_ID, CASES, FIRST, VISION, Case, hf_model, save
from helpers.logits import forward
from helpers.quantizing import quantize
from helpers.whole_sights import difference, logits, made
from tpuconv import api
from tpuconv.checkpoint.manifest import read_manifest
from tpuconv.errors import ConfigError, MappingError, UnsupportedConfig, UsageError
from tpuconv.models.common.heads import HIDDEN, LOGITS, SCORES, TOKEN_SCORES, Head, named_head, shown_head
from tpuconv.models.common.wrapper import is_outside
from tpuconv.models.registry import find_family
from tpuconv.quantize.calibrate.data import from_ids
from tpuconv.quantize.config import parse_config

PLAIN = next(case for case in CASES if case.id == "llama-plain")
IDS = [[5, 17, 99, 3, 42, 8, 77], [9, 4, 31, 0, 0], [7]]  # 0 is padding's, which is not scored
# transformers has no `...Model` of the text models of Llama 4, Llama 3.2 Vision, Step-3.5 and Qwen3-Omni alone, and
# saves those of Kimi K2.5, Ling 3, Mistral Large 4 and Nemotron 3.5 Transcribe under names of no release. That of
# MiniMax-M3 has another architecture, and that of ChatGLM has a head in releases. That of DiffusionGemma returns states
# of a canvas.
WITHOUT = {
    *((HIDDEN, name) for name in ("llama4", "kimi_k25", "kimi_vl", "bailing_hybrid", "step3p5", "qwen3_omni_moe")),
    *((HIDDEN, name) for name in ("mistral_large4", "minimax_m3_vl", "nemo_speechlm", "chatglm", "diffusion_gemma")),
    (HIDDEN, "mllama_text_model"),
    *((HIDDEN, name) for name in released_code.MODELS),  # which have logits alone
    *((SCORES, name) for name in ("ctrl", "modernbert_decoder")),  # whose classifiers have other names
}
EVERY = [
    pytest.param(
        case, returns, id=f"{case}-{returns.replace(' ', '-')}", marks=() if case == PLAIN else pytest.mark.slow
    )
    for case in FIRST.values()
    for returns, known in ((SCORES, OF_TEXTS), (TOKEN_SCORES, OF_TOKENS), (HIDDEN, (case.model_type,)))
    if (returns, case.family) not in WITHOUT and case.model_type in known
]


GEMMA = BY_ID["gemma3_text-plain"].config | {"use_bidirectional_attention": True}
SEEING_BEHIND = [
    Case(f"gemma3_text-{name}", "gemma3_text", "gemma3_text", GEMMA | config)
    for name, config in {
        "seeing-behind": {},
        "narrow": {"sliding_window": 2, "head_dim": 10},
        "odd-window": {"sliding_window": 7, "num_attention_heads": 4, "num_key_value_heads": 1, "attention_bias": True},
        "windows-alone": {"layer_types": ["sliding_attention"] * 4, "sliding_window": 4, "query_pre_attn_scalar": 7},
        "no-windows": {"layer_types": ["full_attention"] * 3, "num_hidden_layers": 3, "intermediate_size": 35},
        "pattern": {"layer_types": None, "num_hidden_layers": 7, "rope_parameters": None, "sliding_window": 6},
    }.items()
]
"""Models as EmbeddingGemma, whose tokens see those behind them."""


@pytest.fixture(scope="session")
def headless(shared: Any) -> Any:
    """The folder of a case as transformers saves it that returns scores or hidden states."""
    return lambda case, returns: shared(
        f"{case.key}-{returns.replace(' ', '-')}-hf", lambda folder: save(case, folder, returns=returns)
    )


@pytest.fixture(scope="session")
def converted_headless(shared: Any, headless: Any) -> Any:
    """The folder of such a case as tpuconv converts it."""
    return lambda case, returns: shared(
        f"{case.key}-{returns.replace(' ', '-')}-orbax", lambda folder: convert(headless(case, returns), folder)
    )


@pytest.mark.parametrize(
    ("case", "returns"),
    [
        *EVERY,
        *(
            pytest.param(case, HIDDEN, id=case.id, marks=() if case == SEEING_BEHIND[0] else pytest.mark.slow)
            for case in SEEING_BEHIND
        ),
        *(
            pytest.param(BY_ID["opt-projected"], returns, id=f"opt-projected-{returns.partition(' ')[0]}")
            for returns in (SCORES, HIDDEN)
        ),
    ],
)
def test_what_transformers_returns(
    case: Case, returns: str, headless: Any, converted_headless: Any, tmp_path: Path
) -> None:
    import torch

    folder, out = headless(case, returns), converted_headless(case, returns)
    assert read_manifest(out).returns == returns
    reference, ours = hf_model(case, returns=returns), tpuconv.load(out)
    for ids in IDS:
        with torch.no_grad():
            found = reference(torch.tensor([ids]))
        want = (found.last_hidden_state if returns == HIDDEN else found.logits).numpy()
        have = np.asarray(ours(jnp.array([ids])))
        assert have.shape == want.shape
        assert want.shape[:-1] == ((1,) if returns == SCORES else (1, len(ids)))
        assert np.abs(have - want).max() <= 2e-5 * np.abs(want).max()
    skipped = read_manifest(out).raw["skipped"]
    is_part = any(is_outside(skip["reason"]) for skip in skipped)  # of a multimodal model
    api.export(out, tmp_path / "back", with_skipped=folder if is_part else None)
    source, back = read_tensors(folder), read_tensors(tmp_path / "back")
    assert len(source) - len(back) == (0 if is_part else sum(skip["count"] for skip in skipped))
    with_others = {*VISION, "phi4_multimodal", "qwen4_exp_text", "minimax"}  # the last two have hashes and decays
    assert bool(skipped) == (case.family in with_others)
    assert all(same_bits(x, source[name]) for name, x in back.items())


@pytest.mark.parametrize(
    ("architecture", "returns", "labels"),
    [("Qwen2ForRewardModel", SCORES, 1), ("Qwen2ForProcessRewardModel", TOKEN_SCORES, 2)],
)
def test_reward_models_whose_scores_are_of_an_mlp(
    architecture: str, returns: str, labels: int, hf: Any, tmp_path: Path
) -> None:
    """As Qwen2.5-Math's, whose own code has the class."""
    case, random = FIRST["qwen2"], np.random.default_rng(0)
    config, tensors = json.loads((hf(case) / "config.json").read_text()), dict(read_tensors(hf(case)))
    tensors.pop("lm_head.weight", None)
    D = config["hidden_size"]
    for name, shape in {"0.weight": (D, D), "0.bias": (D,), "2.weight": (labels, D), "2.bias": (labels,)}.items():
        tensors[f"score.{name}"] = random.normal(size=shape).astype(np.float32)
    source = write_checkpoint(tmp_path / "hf", config | {"architectures": [architecture]}, tensors)
    api.convert(source, tmp_path / "out")
    assert read_manifest(tmp_path / "out").returns == returns
    scores = np.asarray(tpuconv.load(tmp_path / "out")(jnp.array(IDS[:1])))
    assert scores.shape == ((1, labels) if returns == SCORES else (1, len(IDS[0]), labels))
    compared = api.compare(tmp_path / "out", source=source)
    assert compared.passed
    api.export(tmp_path / "out", tmp_path / "back")
    back = read_tensors(tmp_path / "back")
    assert back.keys() == tensors.keys()
    assert all(same_bits(back[name], x) for name, x in tensors.items())
    served = api.convert(source, tmp_path / "served", target="huggingface", quantize="int8_default").out
    described = json.loads((served / "config.json").read_text())["quantization_config"]
    assert described["ignore"] == ["score.0", "score.2", "lm_head", "re:^$"]  # vLLM gives these layers no name
    with pytest.raises(UsageError, match="fp8 cannot exclude them"):
        api.plan(source, target="huggingface", quantize="fp8_block", scheme="fp8").plan.check()
    del tensors["score.0.bias"]
    write_checkpoint(tmp_path / "broken", config | {"architectures": [architecture]}, tensors)
    with pytest.raises(MappingError, match=r"score\.0\.bias"):
        api.plan(tmp_path / "broken").plan.check()


@pytest.mark.parametrize("scan", [False, True], ids=["layers", "scan"])
@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
def test_a_padded_batch_of_a_model_that_sees_behind(scan: bool, left: bool, converted_headless: Any) -> None:
    case = SEEING_BEHIND[-1]
    model = tpuconv.load(converted_headless(case, HIDDEN))
    if scan:
        model.stack_layers()
    rows = [np.arange(3, 18), np.arange(40, 31, -1)]
    ids, mask = np.full((2, 20), 5), np.zeros((2, 20), bool)
    for row, own in enumerate(rows):
        columns = slice(20 - len(own), 20) if left else slice(len(own))
        ids[row, columns], mask[row, columns] = own, True
    found = np.asarray(forward(model, jnp.array(ids), jnp.array(mask)))
    for row, own in enumerate(rows):
        alone = np.asarray(forward(model, jnp.array(own)[None]))[0]
        assert np.abs(found[row][mask[row]] - alone).max() <= 2e-5 * np.abs(alone).max()
    with pytest.raises(UsageError, match="it has no cache"):
        model.init_cache(1, 8)


@pytest.mark.slow
def test_an_embedding_model_that_sees_behind_is_quantized_and_compared(
    headless: Any, converted_headless: Any, tmp_path: Path
) -> None:
    out = converted_headless(SEEING_BEHIND[0], HIDDEN)
    assert api.compare(out).passed
    api.quantize(out, tmp_path / "int8", config="int8_weight_only")
    api.convert(headless(SEEING_BEHIND[0], HIDDEN), tmp_path / "at-once", quantize="int8_weight_only")
    one, other = (np.asarray(forward(tpuconv.load(tmp_path / name), np.array(IDS[:1]))) for name in ("int8", "at-once"))
    assert np.array_equal(one, other)


STATIC = """
qwix:
  rules:
  - module_path: 'layers/[0-9]+/(attn|mlp)/.+'
    weight_qtype: int8
    act_qtype: int8
    act_static_scale: true
    act_batch_axes: [0, 1]
calibration: {method: nearest}
"""


@pytest.mark.slow
def test_a_language_model_that_sees_behind_does_not_decode(converted_headless: Any, tmp_path: Path) -> None:
    out = converted_headless(SEEING_BEHIND[0], LOGITS)
    for call in (lambda: api.benchmark(out), lambda: api.fit(out, topologies=["v5e:1x1"])):
        with pytest.raises(UsageError, match="it has no cache"):
            call()
    ids = from_ids("ids", np.random.default_rng(0).integers(3, 100, (4, 24)))
    quantize(out, tmp_path / "static", parse_config(STATIC.encode(), "static", "static.yaml"), ids)
    assert np.isfinite(np.asarray(forward(tpuconv.load(tmp_path / "static"), np.array(IDS[:1])))).all()


@pytest.mark.slow
def test_scores_of_a_padded_batch(converted_headless: Any) -> None:
    model = tpuconv.load(converted_headless(PLAIN, SCORES))
    alone = [np.asarray(forward(model, jnp.array([ids]))) for ids in ([5, 17, 99], [9, 4, 31, 8, 44])]
    for left in (False, True):
        padding = [np.array([3, 3]), np.array([], int)]  # not the id of padding: the mask tells
        rows = [np.concatenate([pad, ids] if left else [ids, pad]) for ids, pad in
                zip(([5, 17, 99], [9, 4, 31, 8, 44]), padding, strict=True)]  # fmt: skip
        mask = np.array([[False, False, True, True, True] if left else [True, True, True, False, False], [True] * 5])
        scores = np.asarray(forward(model, jnp.array(np.stack(rows), int), mask))
        assert np.abs(scores - np.concatenate(alone)).max() <= 1e-5 * np.abs(scores).max()


@pytest.mark.parametrize(
    ("architecture", "tensors", "returns"),
    [
        ("LlamaForCausalLM", (), LOGITS),
        ("LlamaForSequenceClassification", (), SCORES),
        ("LlamaForTokenClassification", ("score.weight", "score.bias"), TOKEN_SCORES),
        ("LlamaForTokenClassification", ("lm_head.weight", "score.weight"), TOKEN_SCORES),
        ("LlamaModel", (), HIDDEN),
        ("LlamaForCausalLM", ("layers.0.mlp.up_proj.weight",), HIDDEN),  # as Qwen3-Embedding
        ("LlamaForCausalLM", ("model.layers.0.mlp.up_proj.weight",), LOGITS),
        ("LlamaForCausalLM", ("model.layers.0.mlp.up_proj.weight", "score.weight"), SCORES),
        ("LlamaForCausalLM", ("lm_head.weight", "score.weight"), LOGITS),
        ("LlamaModel", ("model.layers.0.mlp.up_proj.weight",), HIDDEN),
        ("LlamaModel", ("model.layers.0.mlp.up_proj.weight", "lm_head.weight"), LOGITS),
        ("LlamaForSequenceClassification", ("lm_head.weight", "score.weight"), SCORES),
        ("LlamaForSequenceClassification", ("lm_head.weight",), LOGITS),
        ("FSDPLlamaForCausalLM", ("lm_head.weight",), LOGITS),  # as FSDP2 names classes
        ("FSDPLlamaForSequenceClassification", ("score.weight",), SCORES),
        ("LlamaForCausalLM", ("layers.0.mlp.up_proj.weight", "embed_tokens.weight"), HIDDEN),
        ("LlamaForCausalLM", ("layers.0.ffn.gate.weight", "embed.weight"), LOGITS),  # DeepSeek V4's names, tied
        ("LlamaForCausalLM", ("layers.0.gate.weight", "tok_embeddings.weight"), LOGITS),  # Mistral's names, tied
        ("LlamaModel", ("layers.0.gate.weight", "tok_embeddings.weight", "output.weight"), LOGITS),
    ],
)
def test_the_architecture_and_the_tensors_tell(architecture: str, tensors: tuple[str, ...], returns: str) -> None:
    family = find_family({"model_type": "llama", "architectures": [architecture]})
    assert family.returns({"architectures": [architecture]}, tensors) == returns
    embedding = "model.embed_tokens.weight"
    assert shown_head(named_head(architecture, family.architectures) or "", tensors, embedding) == returns


def test_a_language_model_whose_names_have_no_prefix_may_be_tied() -> None:
    raw = {"model_type": "cosmos3_omni", "architectures": ["Cosmos3OmniForConditionalGeneration"]}
    names = ("layers.0.mlp.up_proj.weight", "embed_tokens.weight")
    assert find_family(raw).returns(raw, names) == LOGITS
    assert find_family(raw).returns({"architectures": ["Cosmos3OmniModel"]}, names) == HIDDEN


def test_an_embedding_model_that_is_named_as_a_language_model_is_told_what_to_set(hf: Any, tmp_path: Path) -> None:
    """Without a head that is not tied it is either an embedding model, or damaged."""
    config, tensors = json.loads((hf(PLAIN) / "config.json").read_text()), dict(read_tensors(hf(PLAIN)))
    del tensors["lm_head.weight"]
    write_checkpoint(tmp_path / "hf", config | {"tie_word_embeddings": False}, tensors)
    with pytest.raises(MappingError, match="has no head, and") as error:
        api.convert(tmp_path / "hf", tmp_path / "out")
    assert 'set architectures in config.json to ["LlamaModel"]' in (error.value.hint or "")
    write_checkpoint(tmp_path / "hf", config | {"architectures": ["LlamaModel"], "tie_word_embeddings": False}, tensors)
    api.convert(tmp_path / "hf", tmp_path / "out")
    assert read_manifest(tmp_path / "out").returns == HIDDEN


def test_a_shared_matrix_under_the_name_of_the_head(tmp_path: Path) -> None:
    """Programs that save a shared matrix once may keep this name; transformers reads it."""
    config = qwen3_config(tie_word_embeddings=True)
    tensors = read_tensors(random_checkpoint(tmp_path / "plain", config, "float32"))
    write_checkpoint(
        tmp_path / "hf", config, {n.replace("model.embed_tokens", "lm_head"): x for n, x in tensors.items()}
    )
    api.convert(tmp_path / "hf", tmp_path / "out")
    assert api.compare(tmp_path / "out", source=tmp_path / "hf").passed
    api.export(tmp_path / "out", tmp_path / "back")
    back = read_tensors(tmp_path / "back")
    assert back.keys() == tensors.keys()
    assert all(same_bits(back[name], x) for name, x in tensors.items())
    untied = {name: x for name, x in tensors.items() if "embed" not in name} | {"lm_head.weight": np.ones((96, 32))}
    write_checkpoint(tmp_path / "untied", qwen3_config(), untied)
    with pytest.raises(MappingError, match="does not match"):
        api.plan(tmp_path / "untied").plan.check()


def test_architectures_of_other_tasks_are_refused() -> None:
    for name in ("MistralForTokenClassification", "MistralModel", "LlamaForQuestionAnswering"):
        with pytest.raises(UnsupportedConfig, match=f"not its architecture {name}"):
            find_family({"model_type": "llama", "architectures": [name]})
    assert find_family({"model_type": "gemma3_text", "architectures": ["Gemma3TextModel"]}).name == "gemma3_text"


def test_labels() -> None:
    assert Head.from_hf(SCORES, {"id2label": {"0": "a"}, "num_labels": 7, "pad_token_id": 3}) == Head(SCORES, 1, 3)
    assert Head.from_hf(SCORES, {"num_labels": 7, "text_config": {"pad_token_id": 5}}) == Head(SCORES, 7, 5)
    assert Head.from_hf(SCORES, {}) == Head(SCORES, 2, None)
    assert Head.from_hf(HIDDEN, {"num_labels": "x"}) == Head(HIDDEN)
    for wrong in ({"num_labels": 0}, {"num_labels": True}, {"id2label": {}}, {"num_labels": 1 << 17}):
        with pytest.raises(ConfigError, match="labels"):
            Head.from_hf(SCORES, wrong)
    with pytest.raises(ConfigError, match="pad_token_id"):
        Head.from_hf(SCORES, {"pad_token_id": [1]})


def released(folder: Path, out: Path, change: Any, **config: Any) -> Path:
    """A checkpoint with other names of tensors, and another config.json."""
    raw = json.loads((folder / "config.json").read_text()) | config
    return write_checkpoint(out, raw, {change(name): x for name, x in read_tensors(folder).items()})


@pytest.mark.slow
def test_names_of_releases(headless: Any, converted_headless: Any, tmp_path: Path) -> None:
    """With the prefix of the language model that it was made of, or with its architecture."""
    folder = headless(PLAIN, HIDDEN)
    prefixed = released(folder, tmp_path / "prefixed", lambda name: f"model.{name}")
    misnamed = released(folder, tmp_path / "misnamed", lambda name: name, architectures=["LlamaForCausalLM"])
    want = np.asarray(forward(tpuconv.load(converted_headless(PLAIN, HIDDEN)), np.array(IDS[:1])))
    for source in (prefixed, misnamed):
        plan = convert(source, tmp_path / f"{source.name}-out")
        assert plan.table.release.spelling == ({} if source is prefixed else {"model": ""})
        assert np.array_equal(forward(tpuconv.load(tmp_path / f"{source.name}-out"), np.array(IDS[:1])), want)
        api.export(tmp_path / f"{source.name}-out", tmp_path / f"{source.name}-back")
        assert read_tensors(tmp_path / f"{source.name}-back").keys() == read_tensors(source).keys()
        assert api.compare(tmp_path / f"{source.name}-out").statistics.to_json()["passed"]


def test_what_does_not_fit_is_an_error(headless: Any, tmp_path: Path) -> None:
    scores = headless(PLAIN, SCORES)
    other = released(scores, tmp_path / "labels", lambda name: name, id2label={"0": "good"})
    with pytest.raises(MappingError) as error:
        plan_for(other).check()
    assert "score.weight  F32 [3, 48] (1 tensor) should be [1, 48] by config.json" in error.value.details
    # A language model that lost its head is not taken for one without.
    raw = json.loads((scores / "config.json").read_text()) | {"architectures": ["LlamaForCausalLM"]}
    tensors = {name: x for name, x in read_tensors(scores).items() if name != "score.weight"}
    with pytest.raises(MappingError) as error:
        plan_for(write_checkpoint(tmp_path / "lost", raw, tensors)).check()
    assert "lm_head.weight  is missing (1 tensor)" in error.value.details


@pytest.mark.parametrize("returns", [SCORES, HIDDEN])
def test_what_needs_logits_says_so(returns: str, converted_headless: Any, tmp_path: Path) -> None:
    out, says = converted_headless(PLAIN, returns), f"returns {returns}"
    for call in (
        lambda: api.generator(out),
        lambda: api.benchmark(out),
        lambda: api.sensitivity(out),
        lambda: api.fit(out, topologies=["v5e:1x1"]),
        lambda: api.compare(out, layerwise=True),
    ):
        with pytest.raises(UsageError, match=says):
            call()
    (tmp_path / "config.json").write_text(json.dumps(qwen3_config(architectures=["Qwen3Model"])))
    with pytest.raises(UsageError, match="returns hidden states"):
        api.fit(tmp_path / "config.json", topologies=["v5e:1x1"])
    model = tpuconv.load(out)
    with pytest.raises(UsageError, match=says):
        model(jnp.array(IDS[:1]), cache=model.init_cache(1, 8))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_vl", "gemma3", "llava", "qwen2_vl"])
def test_an_embedding_model_that_sees(name: str, tmp_path: Path) -> None:
    """As Qwen3-VL-Embedding: hidden states of texts with images, padded and several in a row."""
    case = replace(made(name), model=made(name).model.base_model)
    case.save(tmp_path / "hf")
    api.convert(tmp_path / "hf", tmp_path / "out")
    manifest = read_manifest(tmp_path / "out")
    assert (manifest.returns, tuple(manifest.parts)) == (HIDDEN, ("vision",))
    model = tpuconv.load(tmp_path / "out")
    want = case.reference(case.ids_BT, case.mask_BT, case.features)[case.mask_BT]
    assert difference(logits(case, model), want) < 2e-5
    api.export(tmp_path / "out", tmp_path / "back")
    assert_same(read_tensors(tmp_path / "back"), read_tensors(tmp_path / "hf"))

    found = api.compare(tmp_path / "out")
    (sight,) = found.sights
    assert found.passed
    assert not found.unseen
    assert (sight.items, sight.outputs.returns) == (2, HIDDEN)
    assert max(sight.features, sight.outputs.relative_error) < 1e-5
    assert found.to_json()["sights"][0]["vectors"]["passed"]
    nnx.update(model.vision, jax.tree.map(lambda values: 1.3 * values, nnx.state(model.vision)))
    tpuconv.save(model, tmp_path / "saved", like=tmp_path / "out")
    failures = api.compare(tmp_path / "saved").failures
    assert len(failures) == 2
    assert all(line.startswith("with vision: ") for line in failures)


@pytest.mark.slow
def test_a_classifier_that_sees_is_compared_on_texts(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForSequenceClassification

    config = made("gemma3").model.config
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_config(config, dtype=torch.float32).save_pretrained(tmp_path / "hf")
    api.convert(tmp_path / "hf", tmp_path / "out")
    manifest = read_manifest(tmp_path / "out")
    assert (manifest.returns, tuple(manifest.parts)) == (SCORES, ("vision",))
    found = api.compare(tmp_path / "out")
    assert found.passed
    assert dict(found.unseen) == {"vision": "scores are compared of texts alone"}


def test_targets(headless: Any, tmp_path: Path) -> None:
    for target in ("maxtext", "tunix", "jax-llm-examples"):
        with pytest.raises(UnsupportedConfig, match=f"{target} has language models only, and this .* returns scores"):
            api.plan(headless(PLAIN, SCORES), target=target)
    api.plan(headless(PLAIN, SCORES), target="nnx").check()


@pytest.mark.slow
@pytest.mark.parametrize("returns", [SCORES, HIDDEN])
def test_every_command_takes_them(returns: str, headless: Any, converted_headless: Any, tmp_path: Path) -> None:
    out = converted_headless(PLAIN, returns)
    found = api.compare(out)
    facts = found.to_json()
    assert found.passed
    assert facts["returns"] == returns
    assert facts["relative_error"] < 1e-5
    assert facts["least_cosine"] > 0.999999
    assert facts["vectors"] == (facts["prompts"] if returns == SCORES else facts["tokens"])
    assert api.compare(out, dtype="bfloat16").passed
    broken = tpuconv.load(out)
    broken.norm.scale[...] *= 1.3
    tpuconv.save(broken, tmp_path / "saved", like=out)
    assert api.compare(tmp_path / "saved").failures == ["relative_error is 0.3, the gate is 0.0001"]
    api.verify(tmp_path / "saved").check()
    api.inspect(out)

    api.quantize(out, tmp_path / "int8", config="int8_weight_only")
    api.convert(headless(PLAIN, returns), tmp_path / "at-once", quantize="int8_weight_only")
    quantized = api.compare(tmp_path / "int8")
    assert quantized.passed is None  # gates of configs are for logits
    assert 1e-4 < quantized.statistics.to_json()["relative_error"] < 0.1
    one, other = (np.asarray(forward(tpuconv.load(tmp_path / name), np.array(IDS[:1]))) for name in ("int8", "at-once"))
    assert np.array_equal(one, other)
    api.export(tmp_path / "int8", tmp_path / "w8")
    ignored = json.loads((tmp_path / "w8" / "config.json").read_text())["quantization_config"]["ignore"]
    assert ("score" in ignored) == (returns == SCORES)

    api.convert(headless(PLAIN, returns), tmp_path / "scanned", scan_layers=True)
    assert api.compare(tmp_path / "scanned").passed
