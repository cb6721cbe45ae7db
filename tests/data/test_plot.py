import io

import numpy as np
import pytest
from rich.console import Console

from fedrema.data import DataSettings, Federation, build_federation, draw_federation, federation_table
from fedrema.errors import BadInput


def shown(federation):
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(federation_table(federation))
    return console.export_text()


@pytest.mark.parametrize(("clients", "samples"), [(5, 40), (20, 40), (100, 10)])
def test_plots_are_written_completely(tmp_path, clients, samples):
    federation = build_federation(DataSettings(clients=clients, samples=samples, partition="dirichlet"))
    path = tmp_path / "made" / "who.png"
    draw_federation(federation, path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [file.name for file in path.parent.iterdir()] == ["who.png"]


def test_many_classes_and_long_names_can_be_plotted(tmp_path):
    names = np.repeat(["a hospital with a very long name", "b"], 30)
    federation = Federation.from_arrays(np.ones((60, 2)), np.arange(60), names)
    draw_federation(federation, tmp_path / "who.svg")
    text = shown(federation)
    assert "a hospital with…" in text
    assert "and 24 more" in text


def test_an_unknown_file_format_is_refused(tmp_path):
    with pytest.raises(BadInput, match=r"the file name must end in .png, .pdf or .svg"):
        draw_federation(build_federation(DataSettings()), tmp_path / "who.docx")


def test_the_table_shows_twenty_rows_at_most():
    text = shown(build_federation(DataSettings()))
    assert "0 (13)  1 (13)  2 (13)  3 (1)" in text
    assert "more" not in text
    text = shown(build_federation(DataSettings(clients=50, samples=10)))
    assert "... and 31 more" in text
    assert "248" in text  # 31 clients with 8 training samples each
