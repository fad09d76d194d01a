"""Tables and numbers as people read them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorac.tables import compact, size, table


@given(st.sets(st.integers(1, 300)) | st.builds(range, st.integers(1, 9), st.integers(9, 300), st.integers(1, 9)))
def test_compact_numbers_say_all_of_them(numbers):
    numbers = sorted(numbers)
    read = []
    for part in filter(None, compact(numbers).split(", ")):
        ends, _, step = part.partition(" by ")
        first, _, last = ends.partition(" … ")
        read += range(int(first), int(last or first) + 1, int(step or 1))
    assert read == numbers


def test_compact_numbers_are_short():
    assert compact([1, 2, 4, 8, 16, 24, 32]) == "1, 2, 4, 8 … 32 by 8"
    assert compact([4, 5, 6, 7]) == "4 … 7"
    assert compact([4, 5, 6]) == "4, 5, 6"


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1536, "1.5 KiB"), (5 << 40, "5.0 TiB")]
)
def test_sizes_are_in_the_largest_unit(count, text):
    assert size(count) == text


def test_columns_are_aligned_and_numbers_to_the_right():
    assert table(("name", "count"), [("a", 5), ("long name", 1000)]).splitlines() == [
        "name       count",
        "a              5",
        "long name   1000",
    ]
