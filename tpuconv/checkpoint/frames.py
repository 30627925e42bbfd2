"""Chunk files of zarr's format 2 with a checksum: zstd frames that hold their values uncompressed.

A file of format 2 is one chunk and holds nothing else, but a zstd frame ends with a checksum of its contents, which
every reader of zarr compares. Raw blocks are written and read at the speed of memory (RFC 8878, 3.1.1):

    header, (block header, 128 KiB of values) of each block, the low 4 bytes of xxh64(values)
"""

from collections.abc import Iterator

import numpy as np
import xxhash

RAW_BLOCK_BYTES = 128 << 10
"""The most values of a block, and the window of the frame: all that a reader keeps."""
_CHECKSUM_BYTES = 4
_BLOCK_HEADER_BYTES = 3
_MAGIC = 0xFD2FB528.to_bytes(4, "little")
_DESCRIPTORS = bytes([0b11000100, (RAW_BLOCK_BYTES.bit_length() - 11) << 3])
"""The frame states its size in 8 bytes and has a checksum; then its window, 2^(10 + exponent)."""
_HEADER_BYTES = len(_MAGIC) + len(_DESCRIPTORS) + 8


def frame_bytes(nbytes: int) -> int:
    """Returns the size of the frame of so many bytes of values."""
    return _HEADER_BYTES + _BLOCK_HEADER_BYTES * _block_count(nbytes) + nbytes + _CHECKSUM_BYTES


def make_frame(buffer: np.ndarray, nbytes: int) -> bytes:
    """Makes the values at the beginning of a buffer a frame in its place. Returns the checksum.

    Args:
        buffer: [frame_bytes(nbytes)] or more bytes.
        nbytes: bytes of the values.
    """
    memory, end = buffer.data, frame_bytes(nbytes)
    checksum = _checksum(memory[:nbytes])
    for start, place, size, header in reversed([*_blocks(nbytes)]):  # each moves behind values that did not move yet
        # It holds the interpreter's lock, unlike an array: to get that back takes longer than a block.
        memory[place : place + size] = memory[start : start + size]
        memory[place - len(header) : place] = header
    memory[:_HEADER_BYTES], memory[end - _CHECKSUM_BYTES : end] = _header(nbytes), checksum
    return checksum


def frame_values(frame: np.ndarray, nbytes: int, what: str) -> np.ndarray:
    """Returns the values of a frame as bytes. If its memory can be written, they take the place of the frame.

    Args:
        frame: [frame_bytes(nbytes)].
        nbytes: bytes of the values.
        what: the name of the frame in an error.

    Raises:
        ValueError: it is not the frame that `make_frame` makes of some values.
    """
    values = frame[:nbytes] if frame.flags.writeable else np.empty(nbytes, np.uint8)
    source, target, checksum = frame.data, values.data, frame[-_CHECKSUM_BYTES:].tobytes()
    is_ours = source[:_HEADER_BYTES] == _header(nbytes)
    for start, place, size, header in _blocks(nbytes):
        is_ours &= source[place - len(header) : place] == header
        target[start : start + size] = source[place : place + size]
    if not is_ours or _checksum(target) != checksum:
        raise ValueError(f"{what} does not hold its checksum")
    return values


def _blocks(nbytes: int) -> Iterator[tuple[int, int, int, bytes]]:
    """Yields for each block where its values begin among all and in the frame, their size, and the block's header."""
    count = _block_count(nbytes)
    for number in range(count):
        start = number * RAW_BLOCK_BYTES
        size = min(RAW_BLOCK_BYTES, nbytes - start)
        is_last = number == count - 1
        header = (size << 3 | is_last).to_bytes(_BLOCK_HEADER_BYTES, "little")  # type 0: raw
        yield start, _HEADER_BYTES + _BLOCK_HEADER_BYTES * (number + 1) + start, size, header


def _block_count(nbytes: int) -> int:
    return max(1, -(-nbytes // RAW_BLOCK_BYTES))


def _header(nbytes: int) -> bytes:
    return _MAGIC + _DESCRIPTORS + nbytes.to_bytes(8, "little")


def _checksum(values: memoryview) -> bytes:
    return xxhash.xxh64_intdigest(values).to_bytes(8, "little")[:_CHECKSUM_BYTES]
