"""Measures what a disk alone needs for the reads, writes and flushes of a conversion, and what huge pages change.

    python benchmarks/disk.py [--folder DIR] [--gigabytes N]

Writes a file, empties the page cache (as root), and reads it in pieces of 8 MB: around the page cache into pages of
4 kB and into huge pages, and by way of the cache. Then reads it in pieces of 32 MB and writes as many bytes in files of
16 MB, flushed by 256 MB, in two threads: the limit of a conversion without computing.
"""

import argparse
import mmap
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from convert import empty_page_cache

MIB = 1 << 20


def memory(nbytes: int, *, huge: bool = True) -> mmap.mmap:
    """Memory whose pages are there."""
    out = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if huge:
        out.madvise(mmap.MADV_HUGEPAGE)
    for at in range(0, nbytes, mmap.PAGESIZE):
        out[at] = 7
    return out


def read(path: Path, piece: int, flags: int, *, huge: bool) -> None:
    buffer, fd = memory(piece, huge=huge), os.open(path, os.O_RDONLY | flags)
    while os.readv(fd, [buffer]) == piece:
        pass
    os.close(fd)


def write(folder: Path, total: int) -> None:
    folder.mkdir()
    buffer, unflushed = memory(16 * MIB), []
    for number in range(total // len(buffer)):
        fd = os.open(folder / str(number), os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
        os.write(fd, buffer)
        unflushed.append(fd)
        if len(unflushed) * len(buffer) >= 256 * MIB:
            flush(unflushed)
    flush(unflushed)


def flush(descriptors: list[int]) -> None:
    while descriptors:
        fd = descriptors.pop()
        os.fsync(fd)
        os.close(fd)


def seconds(*actions: Callable[[], None]) -> float:
    """How long the actions take side by side, with an empty page cache."""
    empty_page_cache()
    threads = [threading.Thread(target=action) for action in actions]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where to work; twice the bytes must fit")
    parser.add_argument("--gigabytes", type=float, default=3.44)
    args = parser.parse_args()
    work = Path(tempfile.mkdtemp(dir=args.folder))
    total = int(args.gigabytes * 1e9) // (16 * MIB) * 16 * MIB
    source = work / "source"
    try:
        with source.open("wb") as file:
            for _ in range(total // (16 * MIB)):
                file.write(os.urandom(16 * MIB))
        print("| what | s | GB/s |\n|---|---|---|")
        for name, flags, huge in (
            ("read around the cache, pages of 4 kB", os.O_DIRECT, False),
            ("read around the cache, huge pages", os.O_DIRECT, True),
            ("read by way of the cache", 0, True),
        ):
            took = seconds(lambda flags=flags, huge=huge: read(source, 8 * MIB, flags, huge=huge))  # type: ignore[misc]
            print(f"| {name} | {took:.2f} | {total / took / 1e9:.2f} |")
        took = seconds(lambda: read(source, 32 * MIB, os.O_DIRECT, huge=True), lambda: write(work / "written", total))
        print(f"| read, and write as many bytes | {took:.2f} | {total / took / 1e9:.2f} |")
    finally:
        shutil.rmtree(work)


if __name__ == "__main__":
    main()
