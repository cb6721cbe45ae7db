"""fedrema compare."""

import csv
import io

import pytest
from rich.console import Console

import fedrema
from fedrema.cli import main
from fedrema.reporting.curves import draw_curves
from tests.cli.refusals import refused
from tests.reporting.folders import write_run, write_two_groups


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return write_two_groups(tmp_path / "runs")


def test_compare_prints_table_differences_and_the_figures_path(runs, tmp_path, capsys):
    assert main(["compare", "runs"]) == 0
    text = capsys.readouterr().out
    assert "82.0±2.0" in text
    assert "-9.0 to +1.0" in text
    assert "Curves: runs/curves.png" in text
    assert (tmp_path / "runs" / "curves.png").is_file()


def test_compare_by_another_quantity_and_reference(runs, capsys):
    assert main(["compare", "runs", "--no-plot", "--reference", "fedavg", "--quantity", "worst_tenth"]) == 0
    text = capsys.readouterr().out
    assert "Difference to FedAvg in worst tenth" in text
    assert "Curves" not in text


def test_the_figure_of_several_folders_is_in_their_common_parent(runs, tmp_path, capsys, monkeypatch):
    assert main(["compare", "runs/fedavg", "runs/fedrema/seed-0"]) == 0
    assert "Curves: runs/curves.png" in capsys.readouterr().out
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert main(["compare", "../runs/fedavg", "../runs/fedrema"]) == 0
    assert f"Curves: {tmp_path}/runs/curves.png" in capsys.readouterr().out
    monkeypatch.setattr("os.path.commonpath", lambda folders: "/")
    assert main(["compare", "../runs/fedavg", "../runs/fedrema"]) == 0
    assert "Curves: curves.png" in capsys.readouterr().out


def test_folders_without_a_common_parent(runs, capsys, monkeypatch):
    def refuse(folders):
        raise ValueError("Paths don't have the same drive")

    monkeypatch.setattr("os.path.commonpath", refuse)
    assert main(["compare", "runs/fedavg", "runs/fedrema"]) == 0
    assert "Curves: curves.png" in capsys.readouterr().out


def test_compare_prints_csv(runs, capsys):
    assert main(["compare", "runs", "--format", "csv", "--plot", "picture.svg"]) == 0
    captured = capsys.readouterr()
    assert [row["method"] for row in csv.DictReader(io.StringIO(captured.out))] == ["FedAvg", "FedReMa"]
    assert captured.err == "Curves: picture.svg\n"


def test_compare_into_a_file(runs, tmp_path, capsys):
    for name, start in (("a.md", "| method |"), ("a.csv", "method,seeds"), ("a.txt", "      ")):
        assert main(["compare", "runs", "--no-plot", "--out", name]) == 0
        captured = capsys.readouterr()
        assert f"Comparison: {name}" in captured.out + captured.err
        assert (tmp_path / name).read_text().startswith(start)
    assert "-9.0 to +1.0" in (tmp_path / "a.txt").read_text()


def test_compare_before_the_first_evaluation(tmp_path, capsys):
    write_run(tmp_path / "new", ended=False, accuracies=(), rounds=5)
    assert main(["compare", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "FedAvg (running, round 0/5)" in text
    assert "Curves: none, because no round has been evaluated yet." in text


def test_compare_refuses_in_one_sentence(runs, tmp_path, capsys):
    assert "needs at least one folder" in refused(capsys, "compare")
    assert "nowhere does not exist" in refused(capsys, "compare", "nowhere")
    assert "valid are 'FedAvg', 'FedReMa'" in refused(capsys, "compare", "runs", "--reference", "x")
    assert ".png, .svg or .pdf are valid" in refused(capsys, "compare", "runs", "--plot", "x.gif")
    assert "exclude each other" in refused(capsys, "compare", "runs", "--plot", "x.png", "--no-plot")
    said = refused(capsys, "compare", "runs", "--quantity", "speed")
    assert "--quantity 'speed' is unknown; valid are honest, best, final, worst_tenth, or one of them with" in said
    (tmp_path / "file").touch()
    assert "cannot write" in refused(capsys, "compare", "runs", "--no-plot", "--out", "file/a.csv")


LATEX = r"""
\begin{tabular}{lrrrrrrr}
\toprule
method & seeds & best (peeks) & honest & final (last 5) & worst tenth & critical rounds & seconds \\
\midrule
FedAvg & $3$ & $\mathbf{80.0 \pm 0.0}$ & $78.0 \pm 2.0$ & $\mathbf{80.0 \pm 0.0}$ &"""


def test_compare_writes_latex_by_format_and_by_ending(runs, tmp_path, capsys):
    assert main(["compare", "runs", "--format", "latex", "--no-plot"]) == 0
    text = capsys.readouterr().out
    assert LATEX in text
    assert r"FedReMa & $3$ & $\mathbf{80.0 \pm 0.0}$ & $\mathbf{82.0 \pm 2.0}$ &" in text
    assert r"FedAvg & $-4.0$ & $-9.0$ to $+1.0$ & $3$ \\" in text
    assert text.count(r"\bottomrule") == text.count(r"\end{tabular}") == 2
    comments = [line for line in text.splitlines() if line.startswith("% ")]
    assert comments[0].startswith("% Accuracy in percent, mean ± standard deviation over seeds.")
    assert main(["compare", "runs", "--out", "table.tex", "--no-plot"]) == 0
    assert (tmp_path / "table.tex").read_text(encoding="utf-8") == text


def test_labels_are_escaped_in_latex(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "runs" / "one", "mine:A_b", seed=0)
    write_run(tmp_path / "runs" / "two", "mine:A_b", seed=0, variant=r"50% of {x} & $y$ \input#~^")
    assert main(["compare", "runs", "--format", "latex", "--no-plot"]) == 0
    text = capsys.readouterr().out
    assert r"50\% of \{x\} \& \$y\$ \textbackslash{}input\#\textasciitilde{}\textasciicircum{}" in text


def test_a_comparison_can_be_printed_and_shown(runs):
    table = fedrema.compare(runs).table()
    for text in (str(table), repr(table), f"{table}"):
        assert "82.0±2.0" in text
        assert "Accuracy in percent" in text
        assert "\x1b" not in text
        assert "object at" not in text
    stream = io.StringIO()
    Console(file=stream, width=100).print(table)
    assert "82.0±2.0" in stream.getvalue()


def test_curves_are_drawn_into_a_file_named_by_text(runs, tmp_path):
    draw_curves(runs, "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
