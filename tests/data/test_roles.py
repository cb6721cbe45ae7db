import pytest

from fedrema.data import DataSettings, build_federation
from fedrema.data.roles import Roles, TableOptions, find_roles
from fedrema.errors import BadInput


def test_columns_with_the_usual_names_need_no_settings():
    names = ["a", "label", "site", "split", "b"]
    assert find_roles(names, TableOptions(), False) == Roles(("label",), "site", "split", ("a", "b"))


def test_columns_are_named_by_settings():
    names = ["a", "who", "out,come", "part", "b", "target"]
    options = TableOptions("out,come", "who", "part", "b, target")
    assert find_roles(names, options, False) == Roles(("out,come",), "who", "part", ("b", "target"))
    several = TableOptions(target="a, b", client_column="who")
    assert find_roles(names, several, False).targets == ("a", "b")
    listed = TableOptions(target=["a"], client_column="who", columns=["b"])
    assert find_roles(names, listed, False) == Roles(("a",), "who", None, ("b",))


def test_a_file_per_client_needs_no_client_column():
    assert find_roles(["a", "y", "site"], TableOptions(), True) == Roles(("y",), None, None, ("a",))


def test_samples_to_predict_need_no_target():
    assert find_roles(["a", "b"], TableOptions(target="y"), True, need_target=False).targets == ()
    assert find_roles(["a", "b"], TableOptions(), True, need_target=False).inputs == ("a", "b")


@pytest.mark.parametrize(
    ("names", "options", "message"),
    [
        (
            ["a", "client"],
            {},
            "no column is named target or label or y or class, so none is what to predict: name it with --target; the "
            "columns are a, client.",
        ),
        (["y", "label", "client"], {}, "label, y could be what to predict: name it with --target"),
        (["a", "y"], {}, "no column is named client or site, so none is the client that holds a sample: name it with"),
        (["y", "client", "site"], {}, "client, site could be the client that holds a sample"),
        (["a", "y", "client"], {"target": "z"}, "--target 'z' is not a column; the columns are a, y, client."),
        (["a", "y", "client"], {"client_column": "z"}, "--client-column 'z' is not a column"),
        (["a", "y", "client"], {"split_column": "z"}, "--split-column 'z' is not a column"),
        (["a", "y", "client"], {"columns": "a,z"}, "--columns 'z' is not a column"),
        (["a", "y", "client"], {"columns": "a,a"}, "--columns names a column twice: a, a."),
        (["a", "y", "client"], {"columns": " , "}, "--columns names no column"),
        (["a", "y", "client"], {"columns": "a,y"}, "--columns names 'y', which is the target, the client or the split"),
        (["a", "y", "client"], {"split_column": "y"}, "name a column twice"),
        (["y", "client"], {}, "no columns are left as inputs; the table has only y, client."),
    ],
)
def test_unclear_columns_are_refused(names, options, message):
    with pytest.raises(BadInput) as raised:
        find_roles(names, TableOptions(**options), False)
    assert str(raised.value).startswith(message) or message in str(raised.value)


def test_a_client_column_has_no_meaning_with_a_file_per_client():
    with pytest.raises(BadInput, match=r"--client-column who has no meaning for data with a part per client"):
        find_roles(["a", "y", "who"], TableOptions(client_column="who"), True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scale": "log"}, "--scale log is unknown; valid are federation, site, none"),
        ({"categories": "hash"}, "--categories hash is unknown; valid are onehot, embed"),
        ({"task": "rank"}, "--task rank is unknown; valid are auto, multiclass, binary"),
        ({"image_size": -1}, "--image-size must be 0 or more, got -1"),
        ({"image_size": 10**7}, "--image-size must be from 0 to 10000, got 10000000"),
    ],
)
def test_invalid_settings_are_refused(change, message):
    with pytest.raises(BadInput, match=message):
        DataSettings(**change)


def test_settings_of_tables_have_no_meaning_for_a_dataset():
    with pytest.raises(BadInput, match=r"--target has no meaning for a dataset, which holds arrays; leave it out\."):
        build_federation(DataSettings(target="y"))
