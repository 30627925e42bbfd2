"""What is searched, and what is found."""

from helpers.publishing.search import Scenario

OLD_D = {"OUT/x": ("D", "x"), "OUT/mark": ("mark", "D")}
OLD_O = {"OUT/x": ("O", "x"), "OUT/w": ("O", "w"), "OUT/mark": ("mark", "O")}
A, A_OVER, B_OVER, O_OVER = ("A", False), ("A", True), ("B", True), ("O", True)
C_PART, C_OVER, D_OVER = ("C", "part"), ("C", True), ("D", True)
NOTE = ("user", "OUT/note")
BLIND = ("self-fencing",)
"""Clocks that do not run in a pause: a suspended process goes on with all that it would have done."""

FAULTS = {
    "a user's W/thesis is gone": Scenario("somebody's file in the work folder", [A], {"W/thesis": "user"}),
    "a user's OUT/note is gone": Scenario("A killed; a file in OUT; B --overwrite", [A, B_OVER, NOTE], kills=1),
    "marked complete, with bytes of another plan": Scenario("A suspended; B --overwrite", [A, B_OVER], suspensions=1),
    "nothing failed, nobody finished ['other writer', 'other writer']": Scenario("the same command twice", [A, A]),
    "neither the old output nor a new one is complete": Scenario("the same, --overwrite", [A_OVER, A_OVER], OLD_O),
}
"""What the old protocol does to users, each with a scenario that shows it. In the new one nothing is found."""


def _all_once(title: str, commands: list, initial: dict | None = None) -> Scenario:  # type: ignore[type-arg]
    bounds = {"kills": 1, "suspensions": 1, "lost_answers": 1}
    return Scenario(f"{title}: a kill, a suspension, a lost answer", commands, initial or {}, without=BLIND, **bounds)


FURTHER = [
    _all_once("A and B --overwrite", [A, B_OVER]),
    _all_once("A twice", [A, A]),
    _all_once("A and B over an old output", [A_OVER, B_OVER], OLD_O),
    _all_once("C in two processes", [C_PART, C_PART]),
    Scenario("A over the old output, and back to it", [A_OVER, O_OVER], OLD_O, kills=1, suspensions=2, without=BLIND),
    Scenario("C twice, D over an old output of D", [C_OVER, C_OVER, D_OVER], OLD_D, suspensions=1, without=BLIND),
]

MUTANTS = [
    ("copy", "s3", O_OVER),
    ("clean-sources", "s3", O_OVER),
    ("revoke", "s3", A_OVER),
    ("stamp", "s3", O_OVER),
    ("stamp", "s3-old", O_OVER),
]
"""The rules of the protocol, each with a store and a second command by which its lack is found."""
