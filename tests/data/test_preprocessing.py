import msgspec
import numpy as np
import pytest

from fedrema.data.from_table import statistics_by_client
from fedrema.data.preprocessing import Preprocessing, fit_preprocessing, local_statistics, merge_statistics
from fedrema.data.roles import TableOptions
from fedrema.data.table import CategoryColumn, ImageColumn, NumberColumn, Table
from fedrema.data.text_columns import Kind
from fedrema.errors import BadInput


def table(client=(0, 0, 1, 1), names=("north", "south"), **columns):
    inputs = {
        name: CategoryColumn(
            np.array([values[1].index(each) if each else -1 for each in values[0]], np.int32), values[1]
        )
        if isinstance(values, tuple)
        else NumberColumn(np.array(values, np.float64))
        for name, values in columns.items()
    }
    return Table(inputs, {}, np.array(client), names)


def fit(given, **options):
    sites = statistics_by_client(given, np.zeros(len(given), np.bool_))
    return fit_preprocessing(merge_statistics(sites.values()), TableOptions(**options), sites)


COLOURS = (("red", "blue", None, "red"), ("blue", "red"))


def test_numbers_are_standardised_and_missing_ones_replaced_by_the_mean():
    given = table(a=[1, 3, 5, np.nan], b=[0, 0, 1, 1])
    fitted = fit(given)
    assert fitted.output_names == ("a", "a is missing", "b")
    x = fitted.transform(given)
    deviation = np.sqrt(8 / 3)
    np.testing.assert_allclose(x[:, 0], [-2 / deviation, 0, 2 / deviation, 0], rtol=1e-6)
    assert x[:, 1].tolist() == [0, 0, 0, 1]
    assert x[:, 2].tolist() == [-1, -1, 1, 1]
    assert x.dtype == np.float32


def test_categories_are_columns_of_0_and_1():
    given = table(colour=COLOURS)
    fitted = fit(given)
    assert fitted.output_names == ("colour=blue", "colour=red", "colour=(other)")
    assert fitted.transform(given).tolist() == [[0, 1, 0], [1, 0, 0], [0, 0, 1], [0, 1, 0]]


def test_categories_are_codes_for_an_embedding():
    given = table(colour=COLOURS, size=(("s", "s", "l", "l"), ("l", "s")))
    fitted = fit(given, categories="embed")
    assert fitted.cardinalities == (3, 3)
    x = fitted.transform(given)
    assert x.dtype == np.int32
    assert x.tolist() == [[1, 1], [0, 1], [2, 0], [1, 0]]
    mixed = table(colour=COLOURS, a=[1, 2, 3, 4])
    assert fit(mixed, categories="embed").transform(mixed).dtype == np.float32
    assert fit(mixed, categories="embed").cardinalities == (3, 0)


def test_each_site_can_scale_by_its_own_statistics():
    given = table(a=[1, 3, 10, 10])
    fitted = fit(given, scale="site")
    assert fitted.transform(given)[:, 0].tolist() == [-1, 1, 0, 0]
    unknown = table((0,), ("east",), a=[6.0])
    assert fitted.transform(unknown)[:, 0] == pytest.approx(0)  # mean of the federation
    assert fit(given, scale="none").transform(given)[:, 0].tolist() == [1, 3, 10, 10]
    gaps = table(a=[1, 3, np.nan, 2])
    assert fit(gaps, scale="none").transform(gaps).tolist() == [[1, 0], [3, 0], [2, 1], [2, 0]]


def test_numbers_that_are_too_large_are_refused():
    given = table(a=[1, 2, 1e100, 4])
    with pytest.raises(BadInput, match=r"column 'a' has 1e\+100 in data row 3 \(client 'south'\), which is too large"):
        fit(given, scale="none").transform(given)
    assert fit(given).transform(given)[2, 0] == pytest.approx(3**0.5)


def test_rows_can_be_transformed_in_another_order():
    given = table(a=[1, 3, 5, np.nan], colour=COLOURS)
    fitted = fit(given, scale="site")
    np.testing.assert_array_equal(fitted.transform(given, np.array([3, 0])), fitted.transform(given)[[3, 0]])


def test_constant_and_empty_columns_are_left_out():
    given = table(a=[1, 2, 3, 4], b=[7, 7, 7, 7], c=[np.nan] * 4, d=(("x",) * 4, ("x",)), e=[1, 1, np.nan, 1])
    fitted = fit(given)
    assert fitted.output_names == ("a", "e", "e is missing")
    assert fitted.left_out == {
        "b": "all training values are 7",
        "c": "all training values are missing",
        "d": "all training values are 'x'",
    }
    assert fitted.transform(given)[:, 1].tolist() == [0, 0, 0, 0]
    with pytest.raises(BadInput, match=r"no column can be used: all of them \(b\) are constant or empty"):
        fit(table(b=[7, 7, 7, 7]))


def test_unseen_categories_are_counted_in_one_warning(caplog):
    fitted = fit(table(colour=COLOURS, size=(("s", "s", "l", "l"), ("l", "s"))))
    new = table(
        colour=(("pink", "grey", None, "red"), ("grey", "pink", "red")), size=(("s", "m", "l", "l"), ("l", "m", "s"))
    )
    x = fitted.transform(new)
    assert x[:, 2].tolist() == [1, 1, 1, 0]
    assert caplog.messages == [
        "Warning: 3 values are categories that no training sample has; they are encoded as other: colour (2), size (1)."
    ]


def test_it_is_saved_as_json():
    given = table(a=[1, 3, 5, np.nan], colour=COLOURS, b=[7, 7, 7, 7])
    fitted = fit(given, scale="site")
    text = msgspec.json.encode(msgspec.to_builtins(fitted))
    read = msgspec.convert(msgspec.json.decode(text), Preprocessing)
    assert read == fitted
    np.testing.assert_array_equal(read.transform(given), fitted.transform(given))
    described = fitted.describe()
    assert [entry["kind"] for entry in described] == ["number", "category", "left out"]
    assert described[0]["missing"] == "mean and indicator"
    assert msgspec.json.encode(described)


def test_images_must_have_one_size():
    images = Table({"image": ImageColumn(np.ones((2, 1, 4, 5), np.uint8))}, {}, np.zeros(2, np.int64), ("a",))
    fitted = fit_preprocessing(local_statistics(images, np.arange(2)), TableOptions())
    assert fitted.transform(images).shape == (2, 1, 4, 5)
    assert fitted.output_names == ()
    assert fitted.describe() == [{"column": "image", "kind": "image", "channels": 1, "height": 4, "width": 5}]
    small = Table({"image": ImageColumn(np.ones((2, 1, 4, 4), np.uint8))}, {}, np.zeros(2, np.int64), ("a",))
    with pytest.raises(BadInput, match=r"the images have the shape \(1, 4, 4\); the federation's have \(1, 4, 5\)"):
        fitted.transform(small)
    with pytest.raises(BadInput, match="column 'image' holds no images"):
        fitted.transform(table(image=[1, 2, 3, 4]))


def test_tables_must_have_the_columns_of_the_federation():
    fitted = fit(table(a=[1, 2, 3, 4], colour=COLOURS))
    assert fitted.kinds() == {"a": Kind.NUMBER, "colour": Kind.TEXT}
    with pytest.raises(BadInput, match=r"column 'a' is missing; the columns are colour\."):
        fitted.transform(table(colour=COLOURS))
    with pytest.raises(BadInput, match="column 'colour' must hold text"):
        fitted.transform(table(a=[1, 2, 3, 4], colour=[1, 2, 3, 4]))
    with pytest.raises(BadInput, match="column 'a' must hold numbers"):
        fitted.transform(table(a=COLOURS, colour=COLOURS))
    empty = table(a=[1, 2, 3, 4], colour=[np.nan] * 4)
    assert fitted.transform(empty)[:, -1].tolist() == [1, 1, 1, 1]
