"""LongCat-Flash with embeddings of n-grams: config and mapping table."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

from tpuconv.models.common.config import MOST_OF_A_SIZE
from tpuconv.models.common.defaults import family_config
from tpuconv.models.longcat_flash import family as longcat_flash
from tpuconv.models.registry import family
from tpuconv.notation.letters import Word, declare
from tpuconv.notation.table import Map, under

declare(
    ngram_tables=Word("tables of n-grams, which differ in their length"),
    table_ngrams=Word("vectors of one of these tables"),
    table_width=Word("elements of such a vector", as_="F"),  # the number of vectors has few divisors
)

NGRAM_KEYS = ("ngram_vocab_size_ratio", "emb_neighbor_num", "emb_split_num")


@family_config
class Config(longcat_flash.Config):
    """The keys of config.json. The embedding of a token has embeddings of the n-grams of 2 to `emb_neighbor_num` tokens
    that end with it added, each of `emb_split_num` tables; without these keys it has none. The rows of the tables are
    about `ngram_vocab_size_ratio` times as many as the tokens."""

    model_type: ClassVar[str] = "longcat_flash_ngram"
    only: ClassVar = {
        **longcat_flash.Config.only,
        "attention_method": ("MLA", None),
        "nextn_use_scmoe": (False,),
        "topk_method": (None,),
    }
    most: ClassVar[Mapping[str, int]] = {"emb_neighbor_num": 64, "emb_split_num": 1 << 10}
    least: ClassVar = {**longcat_flash.Config.least, "eos_token_id": 0, "emb_neighbor_num": 2}
    left_out: ClassVar[frozenset[str]] = longcat_flash.Config.left_out | {
        *("params_dtype", "router_dtype", "rounter_params_dtype"),
    }

    ngram_vocab_size_ratio: float | None = None
    emb_neighbor_num: int | None = None
    emb_split_num: int | None = None
    eos_token_id: int | None = 2

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if given := [key for key in NGRAM_KEYS if getattr(self, key) is not None]:
            yield from self._faults_of_ngrams(given)

    def _faults_of_ngrams(self, given: Sequence[str]) -> Iterator[str]:
        if missing := [key for key in NGRAM_KEYS if key not in given]:
            yield f"{', '.join(given)} needs {', '.join(missing)} beside it"
        elif not self.ngram_vocab_size_ratio or self.ngram_vocab_size_ratio < 0:
            yield f"ngram_vocab_size_ratio={self.ngram_vocab_size_ratio} is not positive"
        elif (tables := self.tables_of_all) > self.hidden_size:
            yield f"hidden_size={self.hidden_size} is less than {tables}, the number of tables of n-grams"
        elif max(self.ngram_rows) > MOST_OF_A_SIZE:
            ratio = self.ngram_vocab_size_ratio
            yield f"ngram_vocab_size_ratio={ratio} gives a table of more than {MOST_OF_A_SIZE} n-grams"
        elif self.eos_token_id is None or self.eos_token_id >= self.vocab_size:
            yield f"n-grams need an eos_token_id in the vocabulary, not {self.eos_token_id}"

    @property
    def has_ngrams(self) -> bool:
        """True if embeddings of n-grams are added to the embeddings of tokens."""
        return self.emb_neighbor_num is not None

    @property
    def tables_of_all(self) -> int:
        """The number of tables of n-grams of all lengths together."""
        return ((self.emb_neighbor_num or 1) - 1) * (self.emb_split_num or 0)

    @property
    def ngram_rows(self) -> tuple[int, ...]:
        """The number of vectors of each table."""
        least = (self.ngram_vocab_size_ratio or 0) * self.vocab_size
        return tuple(int(least + 2 * table + 1) for table in range(self.tables_of_all))

    @property
    def ngram_lengths(self) -> tuple[int, ...]:
        """The number of tokens of the n-grams of each table."""
        return tuple(2 + table // (self.emb_split_num or 1) for table in range(self.tables_of_all))

    @property
    def sizes(self) -> dict[str, int]:
        return {
            **super().sizes,
            "ngram_tables": self.tables_of_all,
            "table_ngrams": max(self.ngram_rows, default=0),
            "table_width": self.hidden_size // max(1, self.tables_of_all),
        }

    @property
    def module_sizes(self) -> Mapping[str, Mapping[str, int]]:
        return {f"embed.ngrams.{table}": {"table_ngrams": rows} for table, rows in enumerate(self.ngram_rows)}


NGRAM_TABLE_ROWS = under(
    "model.ngram_embeddings",
    "embed.ngrams.{ngram_tables}",
    Map("embedders.{ngram_tables}.weight", "embedding", "table_ngrams table_width"),
    Map("post_projs.{ngram_tables}.weight", "out.kernel", "D table_width -> table_width D"),
)

TABLE = replace(
    longcat_flash.TABLE,
    rows=(*longcat_flash.TABLE.rows, *NGRAM_TABLE_ROWS),
    copies={
        **longcat_flash.TABLE.copies,
        "model.ngram_embeddings.word_embeddings.weight": "model.embed_tokens.weight",
    },
)

FAMILY = family(Config, TABLE, "LongCat-Flash-Lite", "LongcatFlashNgramForCausalLM")
