"""Counts, bytes and seconds as people write and read them."""

import pytest

from longstraw.units import format_bytes, format_count, format_seconds, parse_count


@pytest.mark.parametrize(
    ("typed", "count"),
    [
        ("2.1M", 2_100_000),
        ("2Mi", 2_097_152),
        ("256K", 256_000),
        ("256Ki", 262_144),
        ("0.5Ki", 512),
        ("1_000", 1_000),
        ("1b", 10**9),
        ("2.1e6", 2_100_000),
        (2.1e6, 2_100_000),
        (1e17, 10**17),
        (4096, 4096),
        (" 16ki ", 16_384),
    ],
)
def test_counts_as_typed(typed, count):
    assert parse_count(typed) == count


@pytest.mark.parametrize("typed", ["99999999999999999999", "1e30", 1e30, "1e9999", "9" * 5000])
def test_a_count_past_every_use_is_refused_at_once(typed):
    with pytest.raises(ValueError, match=r"must be at most 9,223,372,036,854,775,807"):
        parse_count(typed)


def test_two_decimals_of_a_million_are_exact():
    texts = [f"{i // 100}.{i % 100:02d}" for i in range(1, 1000)]
    assert [parse_count(text + "M") for text in texts] == [10_000 * i for i in range(1, 1000)]
    # The control: by floating point some of them come out one short.
    assert any(int(float(text) * 1e6) != 10_000 * i for i, text in enumerate(texts, 1))


@pytest.mark.parametrize("typed", ["1.5", "0.0001K", "2.1Q", "", "many", "-4", "1 2", "0x10", True, None, float("nan")])
def test_what_is_no_count_is_refused(typed):
    with pytest.raises(ValueError, match=r"2\.1M \(10\^6\)"):
        parse_count(typed)


def test_least():
    assert parse_count("0", least=0) == 0
    with pytest.raises(ValueError, match="at least 1"):
        parse_count(0)


@pytest.mark.parametrize("count", [1, 1023, 1024, 100_000, 2**20, 2**21, 3 * 2**19, 2_100_000])
def test_formatted_counts_keep_the_number(count):
    shown = format_count(count)
    assert parse_count(shown.split()[0].replace(",", "")) == count
    if "(" in shown:
        assert parse_count(shown[shown.index("(") + 1 : -1]) == count


def test_bytes_and_seconds():
    assert format_bytes(97_503_000_000) == "97.503 GB"
    assert format_bytes(512) == "512 B"
    assert format_bytes(12_345_678) == "12.3 MB"
    assert format_seconds(0.421) == "0.42 s"
    assert format_seconds(245) == "4 min 05 s"
    assert format_seconds(5160) == "1 h 26 min"
