"""Ranges: one text for one set, and nothing else is read."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manifests.errors import BadInputError
from manifests.ranges import format_ranges, parse_ranges


def held(*numbers: int, n: int) -> np.ndarray:
    array = np.zeros(n, dtype=bool)
    array[list(numbers)] = True
    return array


@pytest.mark.parametrize(
    ("numbers", "n", "text"),
    [
        ((), 4, ""),
        ((), 0, ""),
        ((0,), 1, "0"),
        ((0, 1), 2, "0-1"),
        ((3,), 4, "3"),
        ((0, 2), 4, "0,2"),
        ((0, 1, 2, 4, 6, 7), 8, "0-2,4,6-7"),
        ((*range(16), 17, *range(40, 896)), 896, "0-15,17,40-895"),
    ],
)
def test_a_set_has_this_text_and_the_text_gives_it_back(numbers, n, text):
    assert format_ranges(held(*numbers, n=n)) == text
    back = parse_ranges(text, n, where="w")
    assert back.dtype == np.bool_
    np.testing.assert_array_equal(back, held(*numbers, n=n))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (" ", "is no range"),
        ("1, 2", "is no range"),
        ("1,", "is no range"),
        (",1", "is no range"),
        ("1,,3", "is no range"),
        ("-3", "is no range"),
        ("3-", "is no range"),
        ("1-2-3", "is no range"),
        ("+1", "is no range"),
        ("01", "is no range"),
        ("0-07", "is no range"),
        ("1_0", "is no range"),
        ("1\n", "is no range"),
        ("٣", "is no range"),
        ("all", "is no range"),
        ("9" * 5000, "is no range"),
        ("0-" + "9" * 5000, "is no range"),
        ("5-3", '"5-3" runs backwards, expected "3-5"'),
        ("5-5", '"5-5" is one number, expected "5"'),
        ("16", '"16" goes beyond the last number, 15'),
        ("3-16", '"3-16" goes beyond the last number, 15'),
        ("5,3", '"3" comes after 5: numbers must rise'),
        ("3,3", '"3" comes after 3: numbers must rise'),
        ("3-6,6-8", '"6-8" comes after 6: numbers must rise and not overlap'),
        ("3,4", '"4" follows 3 without a gap: join the two'),
        ("0-3,4-6", '"4-6" follows 3 without a gap: join the two'),
    ],
)
def test_refuses_what_format_ranges_would_not_have_written(text, message):
    with pytest.raises(BadInputError) as error:
        parse_ranges(text, 16, where="drives[1].holds[17]")
    assert str(error.value).startswith("drives[1].holds[17]: ")
    assert message in str(error.value)


def test_a_long_text_is_shortened_in_the_message():
    with pytest.raises(BadInputError) as error:
        parse_ranges(",".join(map(str, range(0, 800, 2))) + ",x", 896, where="w")
    assert "'x' in \"0,2,4" in str(error.value) and len(str(error.value)) < 200


@settings(deadline=None)
@given(st.lists(st.booleans(), max_size=200))
def test_every_set_comes_back(flags):
    array = np.array(flags, dtype=bool)
    np.testing.assert_array_equal(parse_ranges(format_ranges(array), len(flags), where="w"), array)


@settings(deadline=None)
@given(st.text(alphabet="0123,-", max_size=12))
def test_a_text_that_is_read_is_the_one_that_would_be_written(text):
    try:
        array = parse_ranges(text, 40, where="w")
    except BadInputError:
        return
    assert format_ranges(array) == text
