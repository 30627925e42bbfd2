"""What examples/ has for clusters and notebooks: manifests against the schemas of Kubernetes and JobSet, the commands
in them, the image, and the cells of the notebook."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from helpers.pages import parse

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "examples" / "kubernetes"
JOB_SET = {
    "type": "object",
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "jobset.x-k8s.io/v1alpha2"},
        "spec": {
            "additionalProperties": False,
            "properties": {
                "replicatedJobs": {
                    "type": "array",
                    "items": {
                        "required": ["name", "template"],
                        "additionalProperties": False,
                        "properties": {
                            "name": {"type": "string"},
                            "groupName": {"type": "string"},
                            "replicas": {"type": "integer"},
                            "dependsOn": {
                                "items": {
                                    "required": ["name", "status"],
                                    "additionalProperties": False,
                                    "properties": {
                                        "name": {"type": "string"},
                                        "status": {"enum": ["Ready", "Complete"]},
                                    },
                                }
                            },
                            "template": {"type": "object"},
                        },
                    },
                }
            },
        },
    },
}
"""A part of the JobSet v1alpha2 custom resource definition; each `template` is checked as a Job."""


def manifest(name: str) -> dict[str, Any]:
    return yaml.safe_load((FOLDER / name).read_text())


def jobs(name: str) -> list[dict[str, Any]]:
    """The Jobs of a manifest, or of a JobSet's templates."""
    found = manifest(name)
    if found["kind"] == "Job":
        return [found]
    return [
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": each["name"]}, "spec": each["template"]["spec"]}
        for each in found["spec"]["replicatedJobs"]
    ]


@pytest.mark.parametrize("name", ["job.yaml", "jobset.yaml"])
def test_jobs_have_the_schema_of_kubernetes(name):
    for job in jobs(name):
        kubernetes_validate.validate(job, kubernetes_validate.latest_version(), strict=True)
        job["spec"]["completion"] = 4
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(job, kubernetes_validate.latest_version(), strict=True)


def test_a_job_set_has_the_schema_of_its_controller():
    found = manifest("jobset.yaml")
    jsonschema.validate(found, JOB_SET)
    names = [each["name"] for each in found["spec"]["replicatedJobs"]]
    for place, each in enumerate(found["spec"]["replicatedJobs"]):
        assert {other["name"] for other in each.get("dependsOn", ())} <= set(names[:place])


@pytest.mark.parametrize("name", ["job.yaml", "jobset.yaml"])
def test_their_commands_are_commands_of_tpuconv(name):
    for job in jobs(name):
        (container,) = job["spec"]["template"]["spec"]["containers"]
        assert all(isinstance(each, str) for each in container["args"])
        parse(" ".join(["tpuconv", *container["args"]]))
        if "--process-count" in container["args"]:
            spec, count = job["spec"], int(container["args"][container["args"].index("--process-count") + 1])
            assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", count, count)


def test_the_image_is_made_of_files_that_are_there():
    lines = (FOLDER / "Containerfile").read_text().splitlines()
    copied = [word for line in lines if line.startswith("COPY ") for word in line.split()[1:-1]]
    assert {"pyproject.toml", "constraints.txt", "tpuconv"} <= set(copied)
    assert all((ROOT / each).exists() for each in copied)
    extras = set(re.findall(r"EXTRAS=([\w,]+)", "\n".join(lines)))
    known = set(re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE))
    assert extras
    assert {name for each in extras for name in each.split(",")} <= known


@pytest.mark.slow
def test_the_notebook_runs(tmp_path, monkeypatch, capfd):
    """Its cells, one after the other, as a kernel would run them."""
    shutil.copytree(ROOT / "examples" / "tiny-qwen3", tmp_path / "tiny-qwen3")
    monkeypatch.chdir(tmp_path)
    cells = json.loads((ROOT / "examples" / "first_steps.ipynb").read_text())["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert len(sources) >= 6
    names: dict[str, Any] = {}
    for source in sources:
        exec(compile(source, "first_steps.ipynb", "exec"), names)
    shown = capfd.readouterr()
    assert "converting: 100%" in shown.err  # the bar
    assert "In the beginning" in shown.out
    assert not any(cell.get("outputs") for cell in cells)
