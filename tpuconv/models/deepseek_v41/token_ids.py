"""The tokens that n-grams do not tell apart: texts that are alike without case, accents and the kind of white space."""

from functools import cache

import numpy as np

from tpuconv.errors import ConfigError
from tpuconv.models.tokenizer import TOKENIZER_FILE

LONE_SPACE = "\ue000"
"""A character for private use. It stands for a token that is white space alone, whose text would be empty."""


@cache
def joined_ids(tokenizer: bytes, vocabulary: int, count: int) -> bytes:
    """Returns for each token of the vocabulary the number of the tokens that n-grams do not tell apart, as int32. The
    release has no file with these numbers; `build_compressed_token_map` of its `engram.py` computes them so.

    Args:
        tokenizer: the contents of tokenizer.json.
        vocabulary: rows of the embedding; tokens that the tokenizer does not have get the number 0.
        count: how many numbers there are, by config.json: multipliers of hashes depend on it.

    Raises:
        ConfigError: the tokenizer cannot be read, or gives another count.
    """
    from tokenizers import Regex, Tokenizer, normalizers

    try:
        known = Tokenizer.from_buffer(tokenizer)
    except Exception as e:  # of any type
        raise ConfigError(f"{TOKENIZER_FILE} cannot be read: {e}", hint="copy it from the source again") from e
    steps = [
        *(normalizers.NFKC(), normalizers.NFD(), normalizers.StripAccents(), normalizers.Lowercase()),
        normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
        normalizers.Replace(Regex(r"^ $"), LONE_SPACE),
        normalizers.Strip(),
        normalizers.Replace(LONE_SPACE, " "),
    ]
    plain = normalizers.Sequence(steps)
    numbers: dict[str, int] = {}
    ids = np.zeros(vocabulary, np.int32)
    for token in range(min(vocabulary, known.get_vocab_size(with_added_tokens=True))):
        text = known.decode([token], skip_special_tokens=False)
        # A part of a character has no text.
        key = known.id_to_token(token) if "\ufffd" in text else plain.normalize_str(text)
        ids[token] = numbers.setdefault(key or text, len(numbers))
    if len(numbers) != count:
        raise ConfigError(
            f"{TOKENIZER_FILE} has {len(numbers)} tokens that n-grams tell apart, and config.json has "
            f"engram_compressed_vocab_size={count}: the n-grams would be numbered in another way",
            hint=f"copy {TOKENIZER_FILE} from the release",
        )
    return ids.tobytes()
