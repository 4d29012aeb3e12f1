"""Sizes and counts are parsed exactly, or refused."""

import pytest

from tonnage.errors import UsageError
from tonnage.units import GIB, parse_bytes, parse_count, pluralise


def test_sizes_as_pytorch_prints_a_capacity() -> None:
    assert parse_bytes("24GiB") == 24 * GIB
    assert parse_bytes("23.69GiB") == 25_436_943_810  # 23.69 x 2^30 is ...810.56
    assert parse_bytes("14.56 GiB") == 15_633_680_957


@pytest.mark.parametrize("text", ["1.5", "0GiB", "0.0000000001GiB", "24 G", "-1GiB", "GiB"])
def test_invalid_size_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_bytes(text)


def test_count_must_be_whole() -> None:
    assert parse_count("1.5k") == 1500
    with pytest.raises(UsageError):
        parse_count("1.0001k")


@pytest.mark.parametrize(
    ("text", "count"), [("1e9", 10**9), ("1.5e3", 1500), ("15T", 15 * 10**12), ("2E+6", 2 * 10**6)]
)
def test_large_counts_are_written_in_powers_of_ten(text: str, count: int) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize("text", ["1e", "1e99", "e9", "1e-3", "1e9e9"])
def test_other_powers_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="whole number such as"):
        parse_count(text)


def test_count_may_be_zero_where_zero_is_the_least():
    assert parse_count("0", least=0) == 0
    with pytest.raises(UsageError, match="of at least 2"):
        parse_count("1", least=2)


def test_large_counts_are_exact_or_refused():
    assert parse_count("9007199254740993") == 2**53 + 1
    for digits in (400, 5000):  # more than a float holds, and more than Python reads
        with pytest.raises(UsageError, match="whole number such as"):
            parse_count("9" * digits)


def test_singular_and_plural():
    assert [pluralise(value, "step") for value in (0, 1, 2000)] == ["0 steps", "1 step", "2,000 steps"]
    assert [pluralise(value, "micro-batch") for value in (1, 2)] == ["1 micro-batch", "2 micro-batches"]
