"""Tasks of lm-evaluation-harness: the same scores as its own model of transformers, and what is refused."""

import json
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("lm_eval")  # the extra `eval`

from helpers.quantizing import quantize
from tpuconv import api
from tpuconv.checkpoint.manifest import read_manifest
from tpuconv.errors import UsageError
from tpuconv.quantize.config import find_config
from tpuconv.restore import load
from tpuconv.verify.tasks import TaskList

EXAMPLES = Path(__file__).parent.parent / "examples"
LINES = [line for line in (EXAMPLES / "sample.txt").read_text().splitlines() if len(line) > 80]

TASKS = {
    "choice": """
output_type: multiple_choice
doc_to_text: '{{question}}'
doc_to_choice: choices
doc_to_target: 0
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
""",
    "text": """
output_type: loglikelihood_rolling
doc_to_text: ''
doc_to_target: '{{text}}'
metric_list: [{metric: byte_perplexity}]
""",
    "words": """
output_type: generate_until
doc_to_text: '{{question}}'
doc_to_target: '{{choices[0]}}'
generation_kwargs: {until: ["\\n", ","], max_gen_toks: 12, do_sample: false}
metric_list: [{metric: bleu, aggregation: bleu, higher_is_better: true}]
""",
}
SHOTS = """
description: 'Verses of old.'
num_fewshot: 2
fewshot_split: test
fewshot_config: {sampler: first_n}
"""
TEMPLATES = {
    "with a system message": "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}",
    "without": "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "[{{ m['content'] }}]{% endfor %}",
}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """A folder with a task of each kind, about the lines of examples/sample.txt."""
    folder = tmp_path_factory.mktemp("tasks")
    rows = []
    for i in range(12):
        words, others = LINES[i].split(), LINES[i + 1].split()
        text = "\n".join(LINES[2 * i : 2 * i + 6])  # longer than the 512 positions of the model
        choices = [" ".join(words[8:11]), " ".join(others[8:11])]
        rows.append({"question": " ".join(words[:8]), "choices": choices, "text": text})
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, body in TASKS.items():
        data = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: '{folder / 'data.jsonl'}'}}}}\n"
        (folder / f"{name}.yaml").write_text(f"task: verses_{name}\n{data}test_split: test{body}")
        if name != "text":
            (folder / f"{name}-shots.yaml").write_text(f"task: shots_{name}\n{data}test_split: test{body}{SHOTS}")
    return folder


@pytest.fixture(scope="module")
def ckpt(tmp_path_factory):
    out = tmp_path_factory.mktemp("example") / "plain"
    api.convert(EXAMPLES / "tiny-qwen3", out)
    return out


NAMES = tuple(f"verses_{name}" for name in TASKS)


@pytest.mark.slow
def test_scores_are_those_of_transformers(tasks, ckpt, monkeypatch):
    """In float32, by the model of lm_eval that runs transformers."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("DISABLE_MULTIPROC", "1")
    reference = HFLM(pretrained=str(EXAMPLES / "tiny-qwen3"), dtype="float32", device="cpu", batch_size=4)
    manager = TaskManager(include_path=str(tasks))
    want = simple_evaluate(model=reference, tasks=list(NAMES), task_manager=manager, bootstrap_iters=10)["results"]
    have = TaskList(NAMES, tasks).run(read_manifest(ckpt), partial(load, ckpt), "float32")
    assert {score.task for score in have} == set(NAMES)
    for score in have:
        assert score.value == pytest.approx(want[score.task][f"{score.metric},none"], rel=1e-4)
    assert 0.5 < next(score.value for score in have if score.metric == "acc") < 1
    assert all(score.stderr is not None for score in have if score.metric in ("acc", "bleu"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", TEMPLATES)
def test_scores_of_conversations_are_those_of_transformers(kind, tasks, tmp_path, monkeypatch):
    """With examples as earlier turns, and a system message, which one template refuses."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    source = talking(tmp_path / "hf", TEMPLATES[kind])
    api.convert(source, tmp_path / "out")
    names = ("shots_choice", "shots_words")
    monkeypatch.setenv("DISABLE_MULTIPROC", "1")
    reference = HFLM(pretrained=str(source), dtype="float32", device="cpu", batch_size=4)
    settings = {"task_manager": TaskManager(include_path=str(tasks)), "bootstrap_iters": 10, "limit": 4}
    settings |= {"apply_chat_template": True, "fewshot_as_multiturn": True}
    want = simple_evaluate(model=reference, tasks=list(names), **settings)["results"]
    have = TaskList(names, tasks, 4, chat_template=True).run(
        read_manifest(tmp_path / "out"), partial(load, tmp_path / "out"), "float32"
    )
    assert {score.task for score in have} == set(names)
    for score in have:
        assert score.value == pytest.approx(want[score.task][f"{score.metric},none"], rel=1e-4)


@pytest.mark.slow
def test_requests_are_conversations(tasks, tmp_path):
    """The text that the model reads, by the template of the tokenizer."""
    from tpuconv.models.tokenizer import load_tokenizer
    from tpuconv.verify.task_model import TaskModel

    model = TaskModel.__new__(TaskModel)
    turns = [{"role": role, "content": role[0]} for role in ("system", "user", "assistant", "user")]
    expected = {
        "with a system message": "system: s\nuser: u\nassistant: a\nuser: u\nassistant:",
        "without": "[u][a][u]",
    }
    for kind, template in TEMPLATES.items():
        model.tokenizer = load_tokenizer(talking(tmp_path / kind, template))
        assert model.apply_chat_template(turns) == expected[kind]
    begun = [*turns, {"role": "assistant", "content": "so"}]
    model.tokenizer = load_tokenizer(tmp_path / "with a system message")
    assert model.apply_chat_template(begun, add_generation_prompt=False).endswith("user: u\nassistant: so")
    model.tokenizer.chat_template = "{{ raise_exception('never') }}"
    with pytest.raises(UsageError, match="the chat template cannot be used: TemplateError: never"):
        model.apply_chat_template(turns)


@pytest.mark.slow
def test_answers_end_where_those_of_lm_eval_do():
    """Its stop strings are those of the task and the end token of the tokenizer."""
    from tpuconv.models.tokenizer import load_tokenizer
    from tpuconv.verify.task_model import TaskModel

    asked = []

    def stream_ids(texts, ids, new_tokens, *, stop, width):
        asked.append((tuple(stop), len(ids)))
        yield None, [SimpleNamespace(text=text) for text in texts]

    model = TaskModel.__new__(TaskModel)
    model.tokenizer, model.context, model.on_request = load_tokenizer(EXAMPLES / "tiny-qwen3"), 512, lambda n, of: None
    model.generator = SimpleNamespace(stream_ids=stream_ids)
    untils = [["Question:", "<|im_end|>"], "\n", ["<|endoftext|>"]]
    settings = [{"until": until, "max_gen_toks": 4} for until in untils]
    requests = [SimpleNamespace(args=("x" * n, settings[n % 3]), task_name="t") for n in range(1, 10)]
    assert model.generate_until(requests) == ["x" * n for n in range(1, 10)]
    end = "<|endoftext|>"
    assert sorted(asked) == sorted([(("Question:", "<|im_end|>", end), 4), (("\n", end), 4), ((end,), 4)])


def talking(folder, template):
    """Writes the example model with a chat template."""
    shutil.copytree(EXAMPLES / "tiny-qwen3", folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
    return folder


@pytest.mark.slow
def test_a_tokenizer_without_a_chat_template_is_an_error(tasks, ckpt):
    with pytest.raises(UsageError, match="has no chat template"):
        api.compare_checkpoints(ckpt, ckpt, tasks=["verses_choice"], task_folder=tasks, chat_template=True)


@pytest.mark.slow
def test_compare_has_both_scores(tasks, ckpt, tmp_path):
    quantize(ckpt, tmp_path / "q", find_config("int4_weight_only"))
    flags = ["--tasks", "verses_choice,verses_text", "--task-folder", str(tasks), "--task-limit", "5"]
    command = [sys.executable, "-m", "tpuconv", "compare", ckpt, tmp_path / "q", *flags, "--gate", "top1=0.1"]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["tasks"]
    assert [(each["task"], each["metric"]) for each in found] == [
        ("verses_choice", "acc"),
        ("verses_text", "byte_perplexity"),
    ]
    assert found[1]["reference"] != found[1]["checkpoint"]
    assert found[0]["stderr"].keys() == {"reference", "checkpoint"}


@pytest.mark.slow
def test_a_task_that_is_not_known_is_an_error(tasks, ckpt):
    with pytest.raises(UsageError, match="no task verses_unknown"):
        api.compare_checkpoints(ckpt, ckpt, tasks=["verses_choice", "verses_unknown"], task_folder=tasks)


@pytest.mark.slow
def test_a_task_without_data_is_an_error(tasks, tmp_path):
    text = (
        (tasks / "choice.yaml")
        .read_text()
        .replace("data.jsonl", "missing.jsonl")
        .replace("verses_choice", "verses_missing")
    )
    (tmp_path / "missing.yaml").write_text(text)
    with pytest.raises(UsageError, match="the data of verses_missing cannot be read"):
        TaskList(("verses_missing",), tmp_path).check()
