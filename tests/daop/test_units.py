from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daop.core import DaopError
from daop.units import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("2GiB", 2 << 30),
        ("500MB", 500_000_000),
        ("1.5G", 3 << 29),
        ("4096", 4096),
        ("0", 0),
        (" 3 kib ", 3072),
        (".5M", 1 << 19),
        ("7B", 7),
        ("1TB", 10**12),
    ],
)
def test_parse_size(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1G", "1.2.3", "2 apples", "1e9", "5I", "0x10", "nan", "٣", "9" * 400]
)
def test_nonsense_is_named(text: str) -> None:
    with pytest.raises(DaopError, match="--fast-memory"):
        parse_size(text, "--fast-memory")


@given(st.integers(0, 1 << 59))
def test_what_is_printed_can_be_read_and_is_close(size: int) -> None:
    again = parse_size(format_size(size))
    assert abs(again - size) <= 0.006 * size
