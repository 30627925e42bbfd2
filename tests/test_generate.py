"""Generation against full forward passes: one token at a time, in place, alone and in a batch."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import tpuconv
from helpers.conversions import convert
from helpers.drafts import save_with_drafts
from helpers.encoded import GPT_OSS, mxfp4
from helpers.families import BY_ID, FIRST, PROMPTS, Case, one_fast_of_each, save
from helpers.quantizing import ONE_OF_EACH, quantize_source
from tpuconv import api
from tpuconv.convert.plan.types import Options
from tpuconv.errors import UsageError
from tpuconv.models.generate import ENDED, Generator, JittedProgram, Sampling, left_padded, prefill_chunk
from tpuconv.models.speculate import Speculator
from tpuconv.quantize.config import parse_config

NEW = 6


def tokens(generate: Generator, prompts: list[list[int]], **options: Any) -> np.ndarray:
    return np.stack(list(generate(prompts, NEW, **options)), axis=1)


def right_padded(rows: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """A row is as it would be alone: no token sees what comes after it."""
    width = max(map(len, rows))
    mask_BT = np.arange(width) < np.array([[len(row)] for row in rows])
    return np.array([row + [0] * (width - len(row)) for row in rows]), mask_BT


@pytest.mark.parametrize("case", one_fast_of_each())
def test_greedy_tokens_are_those_of_a_full_forward_pass(case: Case, orbax: Any) -> None:
    """Prompts of different lengths in one batch, each step against each sequence at once."""
    model = tpuconv.load(orbax(case))
    assert_greedy(model, tokens(Generator(model), PROMPTS))


def assert_greedy(model: Any, new_BT: np.ndarray) -> None:
    """The tokens are those of a full forward pass of the model."""
    assert new_BT.shape == (len(PROMPTS), NEW)
    whole = [prompt + list(map(int, new)) for prompt, new in zip(PROMPTS, new_BT, strict=True)]
    logits_BTV = np.asarray(nnx.jit(lambda model, *padded: model(*padded))(model, *right_padded(whole)))
    for prompt, new, logits_TV in zip(PROMPTS, new_BT, logits_BTV, strict=True):
        np.testing.assert_array_equal(logits_TV.argmax(-1)[len(prompt) - 1 : len(prompt) + NEW - 1], new)


# -- weights of less than 8 bits: jax 0.10 refuses their arrays in compiled programs ----------------------------------


PLAIN = Options()


def low_bits(source: Path, out: Path, qtype: str, tile: int, options: Options = PLAIN, modules: str = ".*") -> Any:
    """The model of a source with these weights of its layers."""
    rule = f"{{module_path: 'layers/.*/{modules}', weight_qtype: {qtype}, tile_size: {tile}}}"
    quantize_source(source, out, parse_config(f"qwix: {{rules: [{rule}]}}".encode(), "low", "low.yaml"), options)
    return tpuconv.load(out, mtp=options.include_mtp)


EXPERTS = "moe/(?!router).*"
LOW_BITS = [
    ("llama", "int4", 32, PLAIN, ".*"),
    *(
        pytest.param(family, qtype, tile, options, modules, marks=pytest.mark.slow)
        for family, qtype, tile, options, modules in (
            ("llama", "int4", 32, Options(scan_layers=True), ".*"),
            ("llama", "int2", 32, PLAIN, ".*"),
            ("llama", "int3", 32, PLAIN, ".*"),
            ("llama", "float4_e2m1fn", 32, PLAIN, ".*"),
            ("llama", "mxfp4", 32, PLAIN, ".*"),
            ("llama", "nvfp4", 16, PLAIN, ".*"),
            ("llama", "nf4", 32, PLAIN, ".*"),
            ("gpt_oss", "mxfp4", 32, PLAIN, EXPERTS),
            ("qwen3_moe", "mxfp4", 32, Options(scan_layers=True), EXPERTS),
        )
    ),
]


@pytest.mark.parametrize(("family", "qtype", "tile", "options", "modules"), LOW_BITS)
def test_weights_of_less_than_8_bits_generate(
    family: str, qtype: str, tile: int, options: Options, modules: str, tmp_path: Path
) -> None:
    save(ONE_OF_EACH[family], tmp_path / "hf", "float32")
    model = low_bits(tmp_path / "hf", tmp_path / "out", qtype, tile, options, modules)
    assert_greedy(model, tokens(Generator(model), PROMPTS))


@pytest.mark.slow
def test_a_program_that_jax_calls_is_compiled_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """On every jax, though the installed one may take int4 in compiled programs."""
    save(ONE_OF_EACH["llama"], tmp_path / "hf", "float32")
    generator = Generator(low_bits(tmp_path / "hf", tmp_path / "out", "int4", 32))
    expected = tokens(generator, PROMPTS)
    called = Generator(generator.model)
    called.by_jit = True
    batch, width = len(PROMPTS), max(map(len, PROMPTS))
    length = called.slots(batch, width, NEW)
    steps = called.decode(batch, length), called.prefill(batch, prefill_chunk(batch, width), length)
    assert all(isinstance(step, JittedProgram) for step in steps)
    called.empty_cache(batch, length)
    with jax.log_compiles():
        np.testing.assert_array_equal(tokens(called, PROMPTS), expected)
    assert not [record.message for record in caplog.records if "_step" in record.message]


@pytest.mark.slow
def test_a_source_that_is_kept_packed_generates(tmp_path: Path) -> None:
    save(GPT_OSS[0], tmp_path / "hf", "float32")
    mxfp4(tmp_path / "hf", tmp_path / "mxfp4")
    convert(tmp_path / "mxfp4", tmp_path / "out", Options(encoding="keep"))
    model = tpuconv.load(tmp_path / "out")
    assert_greedy(model, tokens(Generator(model), PROMPTS))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "qtype", "scan_layers"),
    [("glm4_moe", "int8", False), ("glm4_moe", "int4", False), ("qwen3_next", "int4", True)],
)
def test_drafts_change_no_token_of_a_quantized_model(
    family: str, qtype: str, scan_layers: bool, tmp_path: Path
) -> None:
    save_with_drafts(ONE_OF_EACH[family], tmp_path / "hf", 0.0)
    options = Options(include_mtp=True, scan_layers=scan_layers)
    model = low_bits(tmp_path / "hf", tmp_path / "out", qtype, 32, options)
    speculator = Speculator(model)
    np.testing.assert_array_equal(tokens(speculator, PROMPTS), tokens(Generator(model), PROMPTS))
    assert speculator.drafts.checked


@pytest.fixture(scope="module")
def greedy(orbax: Any) -> Generator:
    return Generator(tpuconv.load(orbax(BY_ID["llama-mistral"])))


def test_a_batch_is_each_prompt_alone(greedy: Generator) -> None:
    together = tokens(greedy, PROMPTS)
    for prompt, new in zip(PROMPTS, together, strict=True):
        np.testing.assert_array_equal(tokens(greedy, [prompt])[0], new)


def test_a_sequence_ends_at_eos_and_the_others_go_on(greedy: Generator) -> None:
    free = tokens(greedy, PROMPTS)
    eos = int(free[0, 2])
    assert eos not in free[0, :2]
    out = tokens(greedy, PROMPTS, eos=(eos,))
    for own, other in zip(out, free, strict=True):
        length = int(np.argmax(other == eos)) + 1 if eos in other else NEW
        assert list(own) == [*other[:length], *[ENDED] * (NEW - length)]
    assert len(list(greedy(PROMPTS[:1], NEW, eos=(eos,)))) == 3


def test_the_cache_is_donated_and_a_shape_is_compiled_once(greedy: Generator) -> None:
    ids_BT, mask_BT = left_padded(PROMPTS)
    key = jax.random.key(0)
    batch, tokens = ids_BT.shape
    decode = greedy.decode(batch, tokens + NEW)
    assert greedy.decode(batch, tokens + NEW) is decode
    ids_B1, cache = greedy.read(ids_BT, mask_BT, NEW, key)
    before = cache.layers[0].k_BSKH
    at = before.unsafe_buffer_pointer()
    for _ in range(3):
        ids_B1, cache = decode(greedy.weights, ids_B1, cache, key)
    assert before.is_deleted()
    assert cache.layers[0].k_BSKH.unsafe_buffer_pointer() == at


def test_a_long_prompt_is_read_in_chunks(greedy: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tokens of each prompt at a time: the first chunk is filled up, and of the shorter prompts all padding."""
    whole = tokens(greedy, PROMPTS)
    monkeypatch.setattr("tpuconv.models.generate.PREFILL_TOKENS", 2 * len(PROMPTS) + 1)
    assert prefill_chunk(len(PROMPTS), 9) == 2
    assert greedy.slots(len(PROMPTS), 9, NEW) == 10 + NEW
    np.testing.assert_array_equal(tokens(greedy, PROMPTS), whole)


def test_a_seed_gives_the_same_tokens_again(orbax: Any) -> None:
    sampled = Generator(tpuconv.load(orbax(BY_ID["llama-mistral"])), Sampling(temperature=3.0))
    one, again, other = (tokens(sampled, PROMPTS, seed=seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(one, again)
    assert (one != other).any()


@pytest.mark.parametrize(
    ("prompts", "new", "answer"),
    [
        ([], 1, "no prompt is given"),
        ([[]], 1, "prompt 1 of 1 has no tokens"),
        ([[1], []], 1, "prompt 2 of 2 has no tokens"),
        ([[1]], 0, "`max_new_tokens=0` is less than 1"),
    ],
    ids=["none", "empty", "one empty", "no token"],
)
def test_nothing_to_do_is_refused(prompts: list[list[int]], new: int, answer: str, greedy: Generator) -> None:
    with pytest.raises(UsageError, match=answer):
        next(greedy(prompts, new))


# -- sampling ---------------------------------------------------------------------------------------------------------

LOGITS = st.lists(st.floats(-8, 8, width=32, allow_subnormal=False), min_size=7, max_size=7, unique=True)
DRAWS = 64


@pytest.mark.parametrize("wrong", [{"temperature": -1.0}, {"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.5}], ids=str)
def test_a_sampling_that_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="is invalid"):
        Sampling(**wrong)


@settings(max_examples=40)
@given(logits=LOGITS, top_k=st.none() | st.sampled_from([1, 2, 5, 9]), top_p=st.floats(0.05, 1), seed=st.integers(0, 9))
def test_only_what_top_k_and_top_p_leave_is_drawn(
    logits: list[float], top_k: int | None, top_p: float, seed: int
) -> None:
    order = np.argsort(logits)[::-1][:top_k]
    chances = np.exp(np.array(logits)[order] - max(logits))
    likelier = np.cumsum(chances / chances.sum()) - chances / chances.sum()
    left = set(order[likelier < top_p + 1e-5])
    drawn = Sampling(1.0, top_k, top_p)(jnp.array([logits] * DRAWS, jnp.float32), jax.random.key(seed))
    assert set(map(int, drawn)) <= left
    greedy = Sampling()(jnp.array([logits], jnp.float32), jax.random.key(seed))
    assert int(greedy[0]) == order[0]


def test_tokens_are_drawn_as_often_as_their_chance_is() -> None:
    logits = jnp.log(jnp.array([0.5, 0.3, 0.15, 0.05]))
    keys = jax.random.key(7)

    def shares(sampling: Sampling) -> np.ndarray:
        return np.bincount(sampling(jnp.tile(logits, (40_000, 1)), keys), minlength=4) / 40_000

    np.testing.assert_allclose(shares(Sampling(1.0)), [0.5, 0.3, 0.15, 0.05], atol=0.01)
    np.testing.assert_allclose(shares(Sampling(1.0, top_k=2)), [0.625, 0.375, 0, 0], atol=0.01)
    np.testing.assert_allclose(shares(Sampling(1.0, top_p=0.9)), [0.526, 0.316, 0.158, 0], atol=0.01)
    np.testing.assert_allclose(shares(Sampling(0.5)), np.array([0.25, 0.09, 0.0225, 0.0025]) / 0.365, atol=0.01)


def test_a_model_of_learned_positions_takes_no_more_tokens(orbax: Any, tmp_path: Path) -> None:
    gpt2 = FIRST["gpt2"]
    out, limit = orbax(gpt2), gpt2.hf_config().max_position_embeddings
    rules = tmp_path / "gptq.yaml"
    rules.write_text("calibration: {method: gptq}\nqwix: {rules: [{module_path: layers/.*, weight_qtype: int4}]}\n")
    says = f" needs {limit + 1} positions, and the model has {limit}"
    with pytest.raises(UsageError, match=f"a batch of 3 with {limit - 1} tokens each and 2 new ones{says}"):
        api.benchmark(out, batch=[3], prompt_length=[2, limit - 1], new_tokens=[2])
    with pytest.raises(UsageError, match=f"a sample{says}"):
        api.quantize(out, tmp_path / "out", config=str(rules), calibration="self", length=limit + 1)
