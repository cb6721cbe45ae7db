"""Contents of a grid file besides rows and columns, and invalid files."""

import pytest

from fedrema.cli import main
from fedrema.errors import BadInput
from fedrema.experiments.spec import Claim, FigureSpec
from fedrema.experiments.spec_file import read_experiment
from fedrema.methods import registry

ROWS = "[rows.fedavg]\ntitle = 'FedAvg'\n[rows.fedrema]\n[rows.local]\n"
COLUMNS = "[columns.few]\nsamples = 40\n[columns.many]\nsamples = 80\n"
CLAIM = "[[claims]]\nsays = 'It is so.'\n"


def read(tmp_path, text, changes=None):
    path = tmp_path / "one.toml"
    path.write_text(text)
    return read_experiment(path, changes)


def test_a_claim_is_about_all_columns_and_against_all_other_rows_by_default(tmp_path):
    text = ROWS + COLUMNS + CLAIM + "kind = 'first'\nrows = ['fedrema']\n"
    (claim,) = read(tmp_path, text).claims
    expected = Claim("It is so.", "first", ("fedrema",), ("fedavg", "local"), ("few", "many"), 0.0, "precision")
    assert claim == expected
    text += "over = ['local']\ncolumns = ['few']\n"
    assert read(tmp_path, text).claims[0].over == ("local",)
    assert read(tmp_path, text).claims[0].columns == ("few",)


def test_all_methods_can_be_rows(tmp_path):
    experiment = read(tmp_path, "methods = 'all'\n[rows.local]\ntitle = 'Alone'\n[rows.near]\nmethod = 'fedprox'\n")
    assert [row.name for row in experiment.rows] == [*registry(), "near"]
    titles = {row.name: row.title for row in experiment.rows}
    assert (titles["local"], titles["fedrema"], titles["near"]) == ("Alone", "FedReMa", "near")
    assert {cell.method for cell in experiment.cells} == {*registry()}
    with pytest.raises(BadInput, match=r"methods 'some' is unknown; valid are listed, all\.$"):
        read(tmp_path, "methods = 'some'\n")


def test_methods_can_be_added(tmp_path):
    (tmp_path / "one.toml").write_text(ROWS)
    assert [row.title for row in read_experiment(tmp_path / "one.toml", more_methods=["ditto"]).rows] == [
        "Ditto",
        "FedAvg",
        "fedrema",
        "local",
    ]


def test_without_columns_a_claim_is_about_the_only_one(tmp_path):
    (claim,) = read(tmp_path, ROWS + CLAIM + "kind = 'collapse'\nrows = ['local']\n").claims
    assert (claim.columns, claim.share) == (("",), 0.2)


def test_figures_show_all_rows_and_columns_by_default(tmp_path):
    text = (
        ROWS
        + COLUMNS
        + "[[figures]]\nkind = 'curves'\n[[figures]]\nkind = 'period'\nrows = ['fedrema']\ntitle = 'Gap'\n"
    )
    assert read(tmp_path, text).figures == (
        FigureSpec("curves", ("fedavg", "fedrema", "local"), ("few", "many"), ""),
        FigureSpec("period", ("fedrema",), ("few", "many"), "Gap"),
    )


def test_partition_and_training_may_vary_together(tmp_path):
    text = "vary = 'both'\n[settings]\ndata-seed = 5\n" + ROWS
    cell = read(tmp_path, text).cells[0]
    assert [(cell.settings(seed).simulation.seed, cell.settings(seed).data.data_seed) for seed in (0, 2)] == [
        (0, 5),
        (2, 7),
    ]
    fixed = read(tmp_path, ROWS).cells[0]
    assert {fixed.settings(seed).data.data_seed for seed in range(3)} == {0}


def test_published_numbers_of_other_quantities(tmp_path):
    text = ROWS + "[also.seconds]\nfedavg = 700\n[also.critical_rounds]\nfedrema = 36\n"
    assert read(tmp_path, text).also == {"seconds": {"fedavg": 700}, "critical_rounds": {"fedrema": 36}}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("vary = 'data'\n" + ROWS, "vary 'data' is unknown; valid are training, both"),
        (ROWS + "[claims]\nsays = 'x'\n", r"claims must be written as \[\[claims\]\]"),
        (
            ROWS + CLAIM + "kind = 'good'\nrows = ['local']\n",
            r"claims\]\]: kind 'good' is unknown; valid are first",
        ),
        (ROWS + CLAIM + "kind = 'first'\nrow = 'local'\n", "unknown field 'row'; valid are columns, curve"),
        (ROWS + CLAIM + "kind = 'first'\n", r"needs says = '…' and rows = \[…\]"),
        (ROWS + CLAIM + "kind = 'first'\nrows = ['nobody']\n", "names 'nobody'; valid are fedavg, fedrema, local"),
        (
            ROWS + CLAIM + "kind = 'first'\nrows = 'local'\n",
            r"claims\]\]: rows must be a list of names, got 'local'",
        ),
        (
            ROWS + CLAIM + "kind = 'faster'\nrows = ['local']\nshare = 2\n",
            r"\[\[claims\]\]: share must be a number from 0 to 1, got 2",
        ),
        (
            ROWS + CLAIM + "kind = 'falls'\nrows = ['local']\ncurve = 'loss'\n",
            "curve 'loss' is unknown; valid are precision",
        ),
        (ROWS + "[[figures]]\nkind = 'pie'\n", r"\[\[figures\]\]: kind 'pie' is unknown; valid are curves, samples"),
        (ROWS + COLUMNS + "[also.seconds]\nfedavg = 1\n", r"\[also\] is only valid in an experiment without columns"),
        (
            ROWS + "[also.luck]\nfedavg = 1\n",
            r"luck\] is unknown; valid are final_METRIC, critical_rounds, seconds",
        ),
        (ROWS + "[also.seconds]\nnobody = 1\n", r"'nobody' in \[also.seconds\] is not a row"),
        (ROWS + "[also.seconds]\nfedavg = 'long'\n", r"'fedavg' in \[also.seconds\] must be a number, got 'long'"),
        (ROWS + "[sweep.nobody]\nlr = [1]\n", r"\[sweep.nobody\] is not a row; rows are fedavg, fedrema, local"),
        (ROWS + "[sweep]\nlr = 0.1\n", r"'lr' in \[sweep\] must be a list of values, got 0.1"),
        (ROWS + "[sweep]\nlr = []\n", r"'lr' in \[sweep\] must be a list of values, got \[\]"),
        (ROWS + "[sweep]\nlr = [0.1, -1]\n", "cell fedavg lr = -1 × all: --lr must be"),
        (ROWS + "[sweep]\nmu = [1.0]\n", "cell fedavg mu = 1.0 × all: 'mu' is not a setting of fedavg"),
    ],
)
def test_an_invalid_file_is_refused_in_one_sentence(text, sentence, tmp_path, capsys):
    with pytest.raises(BadInput, match=sentence):
        read(tmp_path, text)
    assert main(["grid", str(tmp_path / "one.toml"), "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "out").exists()
