import numpy as np
import pytest

from fedrema.data.readers.source import read_table
from fedrema.data.roles import Roles
from fedrema.data.text_columns import ColumnBuilder, Kind, KindChanged
from fedrema.errors import BadInput


def build(*blocks, **options):
    builder = ColumnBuilder("a", **options)
    for block in blocks:
        builder.add(block)
    return builder.finish()


class Blocks:
    names, clients = ("a",), ("only",)

    def __init__(self, *blocks):
        self.given = blocks

    def blocks(self, columns):
        return ((0, {"a": block}) for block in self.given)

    def locate(self, part, row):
        return f"row {row} of part {part}"


def read(*blocks, kinds=None):
    return read_table(Blocks(*blocks), Roles((), None, None, ("a",)), kinds).inputs["a"]


@pytest.mark.parametrize("marker", ["", "NA", "N/A", "NaN", "null", "None", "?", "  ", " NA "])
def test_missing_values_of_numbers(marker):
    column = build(["1.5", marker, "-2e3", " 4 "])
    np.testing.assert_array_equal(column.values, [1.5, np.nan, -2000, 4])
    assert column.values.dtype == np.float32


def test_missing_values_of_categories():
    column = build(["", "?", "b"], [" a ", "b", "NA"])
    assert column.categories == ("a", "b")
    assert column.codes.tolist() == [-1, -1, 1, 0, 1, -1]


def test_text_after_blocks_without_values():
    column = build(["", "NA"], ["x", ""])
    assert column.codes.tolist() == [-1, -1, 0, -1]
    assert np.isnan(build(["", "NA"]).values).all()


def test_a_decimal_comma_is_accepted_with_a_warning(caplog):
    column = build(["1", "2,5"], ["-,5", "3.25", "1,5e2"])
    assert column.values.tolist() == [1, 2.5, -0.5, 3.25, 150]
    assert caplog.messages == ["Warning: column 'a' has a decimal comma: 2,5 is read as 2.5."]
    assert build(["1,000,000", "1"]).categories == ("1", "1,000,000")


def test_dates_become_days_with_a_warning(caplog):
    column = build(["1970-01-02", "1969-12-31 12:00", "", "1970-01-01T06:00:00+06:00", "2.1.1970"])
    np.testing.assert_array_equal(column.values, [1, -0.5, np.nan, 0, 1])
    assert column.unit == "days since 1970-01-01"
    assert caplog.messages == ["Warning: column 'a' holds dates; they are used as days since 1970-01-01."]


def test_days_come_first_unless_the_dates_say_otherwise(caplog):
    assert build(["02/01/1970"]).values.tolist() == [1]
    assert build(["01/02/1970", "01/13/1970"]).values.tolist() == [1, 12]
    assert "dates (day/month/year)" in caplog.messages[0]
    assert "dates (month/day/year)" in caplog.messages[1]
    # A later block says so: the source is read again.
    assert read(["01/02/1970"], ["01/13/1970"]).values.tolist() == [1, 12]
    assert read(["13/01/1970"], ["01/13/1970"]).categories == ("01/13/1970", "13/01/1970")
    assert build(["2024-13-01", "x"]).categories == ("2024-13-01", "x")


def test_a_column_with_numbers_and_text_is_read_again_as_text():
    with pytest.raises(KindChanged):
        build(["1.0", "2"], ["x"])
    column = read(["1.0", "2"], ["x", ""])
    assert [column.categories[code] for code in column.codes[:3]] == ["1.0", "2", "x"]
    assert read(["1"], ["2024-01-01"]).categories == ("1", "2024-01-01")


def test_underscores_are_not_part_of_numbers():
    assert build(["1_2", "3_4"]).categories == ("1_2", "3_4")


def test_arrays_of_numbers_and_times():
    assert build(np.array([1, 2]), np.array([0.5, np.nan])).values.tolist()[:3] == [1, 2, 0.5]
    times = np.array(["1970-01-03", "NaT"], "datetime64[D]")
    np.testing.assert_array_equal(build(times).values, [2, np.nan])
    assert read(np.array([1.0, 2.5, np.nan]), ["x"]).categories == ("1", "2.5", "x")
    assert read(times, ["x"]).categories == ("1970-01-03", "x")


def test_numbers_keep_their_precision():
    assert build(["1700000000.1", "1700000000.2"]).values.dtype == np.float64
    assert build(["0.1", "1e39"]).values.dtype == np.float64
    assert build(["0.5", "0.5"]).values.dtype == np.float32
    assert build(["0.1", "0.2"], exact=True).values.dtype == np.float64


def test_infinite_values_are_refused():
    with pytest.raises(BadInput, match=r"column 'a' has an infinite value in row 2 of part 0; values must be finite"):
        read(["1", "2"], ["inf"])


def test_too_many_categories_are_refused():
    message = r"column 'a' has more than 1,000 different texts; name the columns to use with --columns\.$"
    with pytest.raises(BadInput, match=message):
        build([f"x{number}" for number in range(1001)])
    assert len(build([f"x{number}" for number in range(1001)], limit=None).categories) == 1001


def test_a_column_must_be_of_the_kind_that_a_federation_requires():
    with pytest.raises(BadInput, match=r"column 'a' has 'old'; the federation's column holds numbers"):
        read(["1"], ["old"], kinds={"a": Kind.NUMBER})
    assert read(["1", "2"], kinds={"a": Kind.TEXT}).categories == ("1", "2")
    assert read(["02/01/1970"], kinds={"a": Kind.DATE}).values.tolist() == [1]
