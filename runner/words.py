"""Numbers in words and in JSON."""

from math import isfinite


def counted(number: int, word: str) -> str:
    """1 row, 2,000 rows."""
    return f"{number:,} {word}{'s' * (number != 1)}"


def finite(number: float) -> float | None:
    """The number, or None where JSON has none for it."""
    return number if isfinite(number) else None
