"""Signatures of outputs, by OpenSSF's model signing (extra `sign`): the file `model.sig` in an output has the hashes of
all other files, signed. https://github.com/sigstore/model-transparency has the format; its command `model_signing`
verifies the file too.
"""

from ast import literal_eval
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tpuconv.errors import CorruptOutput, OutputError, UsageError, shorten
from tpuconv.names import ADDED_FILES, SIGNATURE
from tpuconv.storage.reports import write_report


def sign(folder: Path, key: Path) -> Path:
    """Signs all files of an output, and writes the signature into it. Returns its file. A signature of this key that is
    there already, of the files as they are, stays.

    Args:
        folder: the output.
        key: a private key of an elliptic curve (PEM), without a password.

    Raises:
        UsageError: the key cannot be used.
        OutputError: there is another signature.
    """
    from cryptography.hazmat.primitives import serialization
    from model_signing import signing

    config, out = signing.Config().set_hashing_config(_hashes()), folder / SIGNATURE
    with TemporaryDirectory() as temporary:
        with _key_errors(key, "private"):
            config = config.use_elliptic_key_signer(private_key=key)
            public = serialization.load_pem_private_key(key.read_bytes(), None).public_key()
        own = Path(temporary) / "key.pub"
        pem = public.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
        own.write_bytes(pem)
        if out.exists():
            try:
                check_signature(folder, own)
            except CorruptOutput as e:
                raise OutputError(
                    f"{out} is not the signature of these files by {key}",
                    details=e.details,
                    hint="move it elsewhere, and sign again",
                ) from e
            return out
        config.sign(folder, Path(temporary) / SIGNATURE)
        write_report((Path(temporary) / SIGNATURE).read_text(encoding="utf-8"), out, "sign", overwrite=False)
    return out


def check_signature(folder: Path, key: Path) -> None:
    """Checks the signature of an output: each file is there as it was signed, and no other file.

    Args:
        folder: the output.
        key: the public key (PEM).

    Raises:
        UsageError: the output has no signature, or the key cannot be used.
        CorruptOutput: the files differ from those that were signed, or another key signed them.
    """
    from cryptography.exceptions import InvalidSignature
    from model_signing import verifying

    if not (folder / SIGNATURE).is_file():
        raise UsageError(f"{folder} has no {SIGNATURE}", hint="`tpuconv push --sign` signs an output")
    config = verifying.Config().set_hashing_config(_hashes())
    with _key_errors(key, "public"):
        config = config.use_elliptic_key_verifier(public_key=key)
    try:
        config.verify(folder, folder / SIGNATURE)
    except (ValueError, KeyError, TypeError, InvalidSignature) as e:
        raise CorruptOutput(
            f"{folder} is not what the owner of {key} signed",
            details=shorten(_differences(e)),
            hint="take the files from where they were signed again, or the right key",
        ) from e


def _differences(error: Exception) -> list[str]:
    """Returns a sentence for each file that differs, without its digests. The verifier lists them as Python shows
    a list."""
    text = str(error) or type(error).__name__
    try:
        return [each.partition(": Expected")[0] for each in literal_eval(text.removeprefix("Signature mismatch: "))]
    except (SyntaxError, ValueError):  # another fault
        return [text]


def _hashes() -> Any:
    from model_signing import hashing

    return hashing.Config().set_ignored_paths(paths=ADDED_FILES, ignore_git_paths=False)


@contextmanager
def _key_errors(key: Path, kind: str) -> Iterator[None]:
    from cryptography.exceptions import UnsupportedAlgorithm

    try:
        yield
    except (AttributeError, OSError, TypeError, ValueError, UnsupportedAlgorithm) as e:
        raise UsageError(
            f"{key} cannot be used as a {kind} key: {e}",
            hint="`openssl ecparam -name prime256v1 -genkey -noout -out key.pem` makes a private key, and "
            "`openssl ec -in key.pem -pubout -out key.pub` its public key",
        ) from e
