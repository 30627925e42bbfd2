"""The protocol by which outputs are published in buckets, as a model: all orders of requests, with kills, suspensions
and lost answers. The search finds the faults of the old protocol, none in the new one, and that each rule is needed.
"""

import pytest

from helpers.attacks.counts import count
from helpers.publishing.new import new
from helpers.publishing.old import old
from helpers.publishing.scenarios import A_OVER, FAULTS, FURTHER, MUTANTS, OLD_O
from helpers.publishing.search import Scenario, Search
from helpers.publishing.store import KINDS


@pytest.mark.parametrize("fault", FAULTS)
def test_the_old_protocol_has_faults(fault):
    assert fault in Search(old, "s3", FAULTS[fault]).run().faults


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind != "s3")) for kind in KINDS])
@pytest.mark.parametrize("fault", FAULTS)
def test_the_new_protocol_has_none_of_them(fault, kind):
    check(kind, FAULTS[fault])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scenario", FURTHER, ids=lambda scenario: scenario.title)
def test_the_new_protocol_survives_all_at_once(scenario, kind):
    check(kind, scenario)


def check(kind: str, scenario: Scenario) -> None:
    result = Search(new, kind, scenario).run()
    assert not result.faults
    count(f"states of the protocol: {scenario.title}", kind, result.states)


@pytest.mark.parametrize(("rule", "kind", "second"), MUTANTS)
def test_each_rule_is_needed(rule, kind, second):
    scenario = Scenario("without a rule", [A_OVER, second], OLD_O, suspensions=1, without=(rule,))
    assert Search(new, kind, scenario).run().faults
