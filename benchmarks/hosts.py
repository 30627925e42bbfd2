"""What each of several hosts reads and writes in a conversion, and how long that takes: computed, not measured.

    python benchmarks/hosts.py --bytes 1e12 --hosts 16 --rate 1e9

A source is taken as units of work in a row, in files of one size. Units are divided as `tpuconv convert` divides them.
A host reads its units, and the rest of the files that it hashes; it writes as many bytes as it converts. Reading and
writing overlap, so that the larger of the two counts.
"""

import argparse
from dataclasses import dataclass

from tpuconv.convert.plan.sizes import UNIT_BYTES
from tpuconv.hosts import divided

FILE_BYTES = 5_000_000_000


@dataclass(frozen=True)
class HostWork:
    """Bytes that one host converts, and those that it reads."""

    converted: int
    read: int


def simulate(
    total: int, hosts: int, *, unit: int = UNIT_BYTES, file: int = FILE_BYTES, streamed: bool = False
) -> list[HostWork]:
    """The work of each host. Files are hashed by the host that has most of them; if they are streamed from the Hub, by
    each host that has a part of them."""
    starts = range(0, total, unit)
    runs = divided(starts, [min(unit, total - start) for start in starts], hosts)
    spans = [(run[0], min(total, run[-1] + unit)) if run else (0, 0) for run in runs]
    read = [stop - start for start, stop in spans]
    for begin in range(0, total, file):
        end = min(total, begin + file)
        shares = [max(0, min(end, stop) - max(begin, start)) for start, stop in spans]
        for host, share in enumerate(shares):
            if host == shares.index(max(shares)) or (streamed and share):
                read[host] += end - begin - share
    return [HostWork(stop - start, n) for (start, stop), n in zip(spans, read, strict=True)]


def seconds(work: list[HostWork], rate: float) -> float:
    """Until the slowest host is done, at `rate` bytes a second in each direction."""
    return max(max(host.converted, host.read) for host in work) / rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--bytes", type=float, default=1e12)
    parser.add_argument("--hosts", type=int, default=16)
    parser.add_argument("--rate", type=float, default=1e9, help="bytes a second of one host, in each direction")
    parser.add_argument("--file", type=float, default=FILE_BYTES, help="bytes of a file of the source")
    parser.add_argument("--streamed", action="store_true", help="from the Hub, without a copy")
    given = parser.parse_args()
    work = simulate(int(given.bytes), given.hosts, file=int(given.file), streamed=given.streamed)
    one = seconds(simulate(int(given.bytes), 1, file=int(given.file)), given.rate)
    took = seconds(work, given.rate)
    converted, read = max(host.converted for host in work), max(host.read for host in work)
    print(f"{given.hosts} hosts: {converted / 1e9:.1f} GB each at most, {read / 1e9:.1f} GB read")
    print(f"read by all: {sum(host.read for host in work) / given.bytes:.2f} times the source")
    print(f"{took:.0f} s at {given.rate / 1e9:g} GB/s, one host: {one:.0f} s, {one / took:.1f} times")
    print(f"{-(-int(given.bytes) // UNIT_BYTES)} entries of the journal")


if __name__ == "__main__":
    main()
