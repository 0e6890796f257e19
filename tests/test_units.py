import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hybridkv.errors import ConfigError
from hybridkv.units import MAX_BYTES, format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("1", 1),
        ("4096", 4096),
        ("7B", 7),
        ("1KiB", 1024),
        ("64MiB", 64 * 2**20),
        ("2GiB", 2**31),
        ("2 GiB", 2**31),
        ("3TiB", 3 * 2**40),
        ("1kB", 1000),
        ("5MB", 5_000_000),
        ("1.5GB", 1_500_000_000),
        ("0.25TB", 250_000_000_000),
        ("1.1GiB", 1181116006),
        ("9223372036854775807", MAX_BYTES),
    ],
)
def test_a_size_is_read_exactly(text, num_bytes):
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "GiB",
        "-1",
        "+1",
        "1e3",
        ".5GiB",
        "1.GiB",
        "1_000",
        "1  GiB",
        " 1",
        "1 ",
        "1GiB\n",
        "٣",
        "nan",
        "9" * 20,
    ],
)
def test_a_text_that_is_no_plain_size_is_a_config_error(text):
    with pytest.raises(ConfigError, match="is not a plain number"):
        parse_bytes(text)


@pytest.mark.parametrize("text", ["1Gb", "1gib", "1G", "1KB", "1PiB"])
def test_an_unknown_unit_is_a_config_error_that_lists_the_known(text):
    with pytest.raises(ConfigError, match="known are B, KiB"):
        parse_bytes(text)


@pytest.mark.parametrize(
    "text", ["0", "0GiB", "0.5", "0.0001KiB", "9223372036854775808", "9000000TiB", "8388608TiB"]
)
def test_a_size_of_no_byte_or_beyond_63_bits_is_a_config_error(text):
    with pytest.raises(ConfigError, match="not in"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0B"),
        (1, "1B"),
        (100, "100B"),
        (1023, "1023B"),
        (1024, "1KiB"),
        (1536, "1.5KiB"),
        (2**20 - 1, "1MiB"),
    ],
)
def test_a_size_is_written_in_the_largest_fitting_unit(num_bytes, text):
    assert format_bytes(num_bytes) == text


@given(st.integers(1, 2**62))
@example(1111)
def test_what_is_written_reads_back_to_within_half_a_percent_and_a_byte(num_bytes):
    assert abs(parse_bytes(format_bytes(num_bytes)) - num_bytes) <= 0.005 * num_bytes + 1


@given(st.integers(1, 1023), st.sampled_from([2**0, 2**10, 2**20, 2**30, 2**40]))
def test_whole_units_read_back_exactly(number, unit):
    assert parse_bytes(format_bytes(number * unit)) == number * unit
