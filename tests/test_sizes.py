"""Numbers of bytes as text."""

import pytest

from tpuconv.text import format_rate, format_size


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (16_777_216, "16.8 MB"),
        (688_600_000_000, "689 GB"),
        (999_600_000, "1 GB"),
        (999_960, "1 MB"),
        (2.5e15, "2,500 TB"),
        (-1500, "-1.5 kB"),
    ],
)
def test_a_size_has_the_unit_that_fits(nbytes, text):
    assert format_size(nbytes) == text


@pytest.mark.parametrize(("value", "text"), [(0.123456, "0.123"), (32.44, "32.4"), (999.4, "999"), (8080.4, "8,080")])
def test_a_rate_has_no_exponent(value, text):
    assert format_rate(value, 3) == text
