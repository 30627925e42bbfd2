"""docs/kl-over-bits.svg is what benchmarks/kl_picture.py makes of the measured points."""

import importlib.util
import json
import re
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parent.parent
spec = importlib.util.spec_from_file_location("kl_picture", ROOT / "benchmarks" / "kl_picture.py")
assert spec
assert spec.loader
kl_picture = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kl_picture)
FACTS = json.loads(kl_picture.FACTS.read_text())
KEYS = {"series", "name", "bits", "mean_kl", "top1", "perplexity", "date", "commit", "where"}


def test_the_committed_picture_is_made_of_the_facts():
    svg = kl_picture.PICTURE.read_text()
    assert svg == kl_picture.render(FACTS["points"], FACTS["model"]), "run python benchmarks/kl_picture.py"
    assert ElementTree.fromstring(svg).tag == "{http://www.w3.org/2000/svg}svg"
    assert set(re.findall(r"https?://[^\"\s]+", svg)) == {"http://www.w3.org/2000/svg"}
    changed = [*FACTS["points"][:-1], FACTS["points"][-1] | {"mean_kl": 0.5}]
    assert svg != kl_picture.render(changed, FACTS["model"])


def test_every_point_says_what_was_measured_and_where():
    points = FACTS["points"]
    assert all(set(point) == KEYS for point in points)
    assert {point["series"] for point in points} == set(kl_picture.SERIES)
    assert len({(point["series"], point["name"]) for point in points}) == len(points)
    readme = (ROOT / "benchmarks" / "README.md").read_text()
    assert all(f"{point['mean_kl']:.4f}" in readme for point in points)


def test_a_curve_goes_through_the_least_point_of_each_quarter_of_a_bit():
    points = [{"bits": bits, "mean_kl": kl} for bits, kl in ((4.5, 0.1), (4.46, 0.2), (8.5, 0.3), (3.5, 0.4))]
    assert [point["bits"] for point in kl_picture.least(points)] == [3.5, 4.5, 8.5]
