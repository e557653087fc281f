"""Tables stand in columns, and numbers are short."""

import pytest

from jaxlit.texts import count, duration, size, table


def test_texts_begin_and_numbers_end_at_one_place() -> None:
    assert table([("name", "kind", "calls"), ("a", "long one", "7"), ("longer", "b", "1,000")], texts=2) == [
        "name    kind      calls",
        "a       long one      7",
        "longer  b         1,000",
    ]
    assert table([("name", "n"), ("a", "")]) == ["name  n", "a"]


@pytest.mark.parametrize(
    "shown, texts",
    [
        (size, {0: "0 B", 1023: "1023 B", 1024: "1.0 KiB", 100 * 1024: "100 KiB", 3 * 2**40: "3.0 TiB"}),
        (size, {5000 * 2**40: "5000 TiB"}),
        (count, {0: "0", 999: "999", 16_384: "16.4k", 999_499: "999k", 999_500: "1M", 3e15: "3P", 5e18: "5,000P"}),
        (duration, {2.0: "2 s", 0.0125: "12.5 ms", 0.00025: "250 us", 0: "0 us"}),
    ],
)
def test_a_number_has_three_digits_and_its_unit(shown, texts) -> None:
    assert {number: shown(number) for number in texts} == texts
