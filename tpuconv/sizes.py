"""How numbers of bytes are written for people."""


def format_size(nbytes: float) -> str:
    """In the unit that fits, with three digits: `999 B`, `1.5 kB`, `688 GB`."""
    if nbytes < 0:
        return f"-{format_size(-nbytes)}"
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} TB"
