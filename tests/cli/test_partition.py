"""fedrema partition."""

import fedrema
from fedrema.cli import main


def test_a_partition_is_saved_plotted_and_can_be_trained_on(in_an_empty_folder, capsys):
    assert (
        main(["partition", "--partition", "dirichlet", "--alpha", "0.3", "--save", "fed.npz", "--plot", "fed.png"]) == 0
    )
    shown = capsys.readouterr().out
    assert "Saved: fed.npz" in shown
    assert "Drawn: fed.png" in shown
    assert (in_an_empty_folder / "fed.png").read_bytes().startswith(b"\x89PNG")
    assert main(["run", "fedavg", "--federation", "fed.npz", "--rounds", "2", "--quiet", "--out", "run"]) == 0
    assert fedrema.load("run").config["federation"]["fingerprint"] == fedrema.Federation.load("fed.npz").fingerprint
