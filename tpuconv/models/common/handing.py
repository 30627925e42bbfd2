"""How layers of a decoder hand something on to later ones: keys and values, or the tokens that they selected."""

from typing import Any

from tpuconv.models.common.steps import Step


class Handing:
    """A base before `nnx.Module` of a decoder. By default no layer hands anything on."""

    def source_of(self, layer: int) -> int | None:
        """Returns the earlier layer that hands something on to a layer besides the hidden states; None if none does."""
        return None

    def handed_on(self, result: Any) -> Any:
        """Returns what a layer hands on to later ones, from the second result of its block."""
        return result

    def by_token(self, handed: Any) -> Any:
        """Returns what a layer hands on with an entry for each token, as calibrations keep it."""
        return handed

    def given(self, step: Step, handed: Any) -> tuple[Step, Any]:
        """Returns the step of a layer, and its cache unless it has one of its own, from what an earlier one hands on to
        it."""
        return step, handed

    def kept(self, layer: int, result: Any) -> Any:
        """Returns the cache of a layer, from the second result of its block."""
        return result
