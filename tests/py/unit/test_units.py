"""Sizes and times in the form that people write and read."""

from __future__ import annotations

import pytest

from torch_sagellm._private.units import parse_size, show_size, show_time, size_text

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


@pytest.mark.quick
@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8", 8),
        ("4KiB", 4 * KIB),
        ("64k", 64 * KIB),
        ("1 mib", MIB),
        ("2g", 2 * GIB),
        ("16 B", 16),
        ("1.5MB", 1_500_000),
    ],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.quick
@pytest.mark.parametrize("text", ["", "KiB", "1.3B", "8KB", "-1"])
def test_a_wrong_size_says_how_to_write_one(text: str) -> None:
    with pytest.raises(ValueError, match="such as 64KiB"):
        parse_size(text)


@pytest.mark.quick
def test_sizes_of_rules_are_exact() -> None:
    assert [size_text(size) for size in (0, 4097, 64 * KIB, 3 * GIB)] == ["0 bytes", "4097 bytes", "64KiB", "3GiB"]


@pytest.mark.quick
def test_sizes_and_times_of_tables_have_three_digits() -> None:
    sizes = {8: "8 B", 1000: "1000 B", 4 * KIB: "4 KiB", 1_500_000: "1.43 MiB", 3 * GIB: "3 GiB"}
    assert [show_size(size) for size in sizes] == list(sizes.values())
    times = [64e-9, 3.456e-6, 12.34e-6, 999.4e-6, 999.9e-6, 12.345e-3, 2.5]
    assert [show_time(time) for time in times] == [
        "64 ns",
        "3.46 us",
        "12.3 us",
        "999 us",
        "1.00 ms",
        "12.3 ms",
        "2.50 s",
    ]
