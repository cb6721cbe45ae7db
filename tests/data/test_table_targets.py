import numpy as np
import pytest

from fedrema.data.table import CategoryColumn, NumberColumn, Table
from fedrema.data.table_targets import make_target
from fedrema.errors import BadInput


def column(values):
    if any(isinstance(each, str) for each in values):
        names = tuple(sorted({each for each in values if each}))
        return CategoryColumn(np.array([names.index(each) if each else -1 for each in values], np.int32), names)
    return NumberColumn(np.array(values, np.float64))


def table(**targets):
    columns = {name: column(values) for name, values in targets.items()}
    rows = len(next(iter(columns.values())))
    return Table({}, columns, np.zeros(rows, np.int64), ("north",))


@pytest.mark.parametrize(
    ("values", "task", "names"),
    [
        (["b", "a", "b"], "binary", ("a", "b")),
        (["c", "a", "b"], "multiclass", ("a", "b", "c")),
        (["10", "9", "x"], "multiclass", ("10", "9", "x")),
        ([0.0, 1.0, 1.0], "binary", ("0", "1")),
        ([-1, 1, 1], "binary", ("-1", "1")),
        ([10, 9, 2], "multiclass", ("2", "9", "10")),
        ([0.5, 1, 1], "regression", ()),
        (list(range(20)), "multiclass", tuple(map(str, range(20)))),
        (list(range(21)), "regression", ()),
    ],
)
def test_the_task_follows_from_the_values(values, task, names):
    target = make_target(table(y=values))
    assert (target.task, target.names) == (task, names)
    if names:
        assert [names[code] for code in target.y] == [
            each if isinstance(each, str) else str(int(each)) for each in values
        ]
    else:
        assert target.y.tolist() == values


def test_several_targets_are_labels():
    target = make_target(table(a=[0, 1, 1], b=["True", "false", "true"], c=["yes", "no", "no"]))
    assert (target.task, target.names) == ("multilabel", ("a", "b", "c"))
    assert target.y.tolist() == [[0, 1, 1], [1, 0, 0], [1, 1, 0]]


def test_a_given_task_decides():
    assert make_target(table(y=[3, 1, 2]), "regression").y.tolist() == [3, 1, 2]
    assert make_target(table(y=[3, 1, 2]), "count").task == "count"
    assert make_target(table(y=[30, 10, 20]), "ordinal").y.tolist() == [2, 0, 1]
    assert make_target(table(y=list(range(50))), "multiclass").names == tuple(map(str, range(50)))


def test_the_classes_of_a_run_are_used():
    assert make_target(table(y=["b", "b"]), class_names=("c", "b", "a")).y.tolist() == [1, 1]
    assert make_target(table(y=[3, 3]), class_names=("1", "2", "3")).task == "multiclass"
    message = r"the target 'y' is 'd' in data row 2 \(client 'north'\); the classes are c, b, a\."
    with pytest.raises(BadInput, match=message):
        make_target(table(y=["b", "d"]), class_names=("c", "b", "a"))


@pytest.mark.parametrize(
    ("values", "task", "message"),
    [
        (
            [1, np.nan],
            "auto",
            r"^the target 'y' is missing in data row 2 \(client 'north'\); every sample needs one\.$",
        ),
        (["", "a"], "auto", r"^the target 'y' is missing in data row 1 \(client 'north'\)"),
        (["a", "a"], "auto", r"^the target 'y' is 'a' in all samples; it must have at least two values\.$"),
        ([2, 2], "auto", r"^the target 'y' is '2' in all samples"),
        ([2.5, 2.5], "auto", r"^the target 'y' is 2.5 in all samples"),
        ([1, 2, 3], "binary", r"^--task binary needs a target with two values; 'y' has 3: 1, 2, 3\.$"),
        (
            [1.5, 2],
            "multiclass",
            r"^--task multiclass needs a target of text or whole numbers; 'y' is 1.5 in data row 1",
        ),
        (["low", "high"], "ordinal", r"^--task ordinal needs a target of whole numbers; 'y' has texts such as 'high'"),
        (
            ["low", "high"],
            "regression",
            r"^--task regression needs a target of numbers; 'y' has texts such as 'high'\.$",
        ),
        ([1, -1], "count", r"^--task count needs whole numbers of 0 or more; 'y' is -1 in data row 2"),
        ([1, 2], "multilabel", r"^--target: several targets must hold 0 and 1; 'y' is 2 in data row 2"),
        (["a", "no"], "multilabel", r"'y' is a in data row 1"),
        ([1, 1], "multilabel", r"^the target 'y' is 1 in all samples"),
    ],
)
def test_invalid_targets_are_refused(values, task, message):
    with pytest.raises(BadInput, match=message):
        make_target(table(y=values), task)


def test_several_targets_need_the_multilabel_task():
    with pytest.raises(BadInput, match=r"--task binary needs one --target; a, b are given\."):
        make_target(table(a=[0, 1], b=[1, 0]), "binary")
