"""Formats numbers for people."""


def format_size(nbytes: float) -> str:
    """Formats a size in the unit that fits, with three digits: `999 B`, `1.5 kB`, `688 GB`."""
    if nbytes < 0:
        return f"-{format_size(-nbytes)}"
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} TB"


def format_count(number: int, noun: str) -> str:
    """Formats a number with a noun: `1 tensor`, `2 tensors`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def format_rate(value: float, digits: int) -> str:
    """Formats a number with so many significant digits below 1000, and as an integer from 1000 on: `32.4`, `8,080`;
    never `8.08e+03`."""
    return f"{value:,.0f}" if value >= 999.5 else f"{value:.{digits}g}"
