import pytest

from layout.sizes import counted, format_rate, format_size, parse_size, word_for
from manifests.errors import UsageError


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [
        ("27.5GB", 27_500_000_000),
        ("512MB", 512_000_000),
        ("40KB", 40_000),
        ("1.5TB", 1_500_000_000_000),
        ("1.1TB", 1_100_000_000_000),
        ("1.005KB", 1005),
        ("123B", 123),
        ("64GiB", 64 * 2**30),
        ("1.5MiB", 3 * 2**19),
        ("2KiB", 2048),
        ("1TiB", 2**40),
        ("1.9B", 1),
    ],
)
def test_reads_sizes_exactly(text: str, n_bytes: int) -> None:
    assert parse_size(text, flag="--host-pool") == n_bytes


def test_a_slot_is_one_record() -> None:
    assert parse_size("16slots", flag="--vram-cache", record_bytes=17_547_264) == 280_756_224
    assert parse_size("1slot", flag="--vram-cache", record_bytes=17_547_264) == 17_547_264


def test_slots_are_refused_where_they_mean_nothing() -> None:
    with pytest.raises(UsageError, match=r"--reserve: '16slots' is not a size; .*slots mean nothing here"):
        parse_size("16slots", flag="--reserve")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "27",
        "27.5",
        "GB",
        "-1GB",
        "+1GB",
        "0B",
        "0GB",
        "0slots",
        "0.4B",
        "nan",
        "infGB",
        "1e3GB",
        "1.5slots",
        "27.5 GB",
        "27.5gb",
        "1,5GB",
        ".5GB",
        "5.GB",
        "1PB",
        "12GBs",
        "1GB\n",
        "16slotss",
        "٣GB",
        "1" * 5000 + "GB",
        "1iB",
    ],
)
def test_refuses_what_is_no_positive_number_with_a_unit(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_size(text, flag="--vram-cache", record_bytes=1000)
    message = str(caught.value)
    assert message.startswith("--vram-cache: ") and repr(text) in message
    assert all(form in message for form in ("27.5GB", "512MB", "40KB", "GiB", "16slots"))


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [
        (0, "0B"),
        (1, "1B"),
        (999, "999B"),
        (1000, "1KB"),
        (9_800, "9.8KB"),
        (17_547_264, "17.5MB"),
        (999_499, "999KB"),
        (999_960, "1MB"),
        (20 * 10**9, "20GB"),
        (27_500_000_000, "27.5GB"),
        (1_450_000_000_000, "1.45TB"),
        (1_234_567 * 10**9, "1235TB"),
    ],
)
def test_writes_three_digits_in_the_fitting_unit(n_bytes: int, text: str) -> None:
    assert format_size(n_bytes) == text


@pytest.mark.parametrize("text", ["27.5GB", "9.8KB", "512MB", "1.45TB", "7B"])
def test_a_written_size_reads_back(text: str) -> None:
    assert format_size(parse_size(text, flag="--reserve")) == text


def test_writes_rates_per_second() -> None:
    assert format_rate(2.31e9) == "2.31GB/s"
    assert format_rate(0.0) == "0B/s"


def test_words_follow_their_numbers() -> None:
    assert [counted(n, "fault") for n in (0, 1, 2)] == ["0 faults", "1 fault", "2 faults"]
    assert [word_for(n, "stays", "stay") for n in (0, 1, 2)] == ["stay", "stays", "stay"]
    assert [counted(n, "copy is", "copies are") for n in (1, 2)] == ["1 copy is", "2 copies are"]
