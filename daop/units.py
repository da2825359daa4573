"""Sizes as people write and read them: '2GiB', '500MB', '1.5G', '4096'."""

from __future__ import annotations

import re

from daop.core import DaopError

_BINARY = ("", "K", "M", "G", "T", "P")
_SIZE = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*([KMGTP]?)(I?B?)", re.IGNORECASE | re.ASCII)

LARGEST = 1 << 60  # of the number alone, far beyond any memory or disk, far below where floats end


def parse_size(text: str, flag: str = "size") -> int:
    """Bytes of a size; ``flag`` names it in the error.

    GiB and G are powers of 1024, GB is a power of 1000, a bare number is bytes.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or (match[3].upper() == "I"):
        raise DaopError(f"{flag} is {text!r}, not a size; write for example 2GiB, 500MB, 1.5G or 4096")
    number, prefix, suffix = float(match[1]), match[2].upper(), match[3].upper()
    if number > LARGEST:
        raise DaopError(f"{flag} is {text[:40]!r}, more than anything holds; write for example 2GiB")
    base = 1000 if prefix and suffix == "B" else 1024
    return int(number * base ** _BINARY.index(prefix))


def format_size(count: int | float) -> str:
    """Binary units with three significant digits: '1.50 GiB', '12.0 MiB', '96 B'."""
    value, sign = abs(float(count)), "-" if count < 0 else ""
    for prefix in _BINARY:
        if value < 1023.5 or prefix == _BINARY[-1]:
            break
        value /= 1024
    if not prefix:
        return f"{sign}{value:.0f} B"
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{sign}{value:.{digits}f} {prefix}iB"
