"""docs/architecture.md states how many files a round passes through."""

import re
import sys
from pathlib import Path

import fedrema

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "fedrema"


def files_of_a_round(folder: Path) -> set[str]:
    """Return the files of fedrema whose functions the second round of a run calls; the first one also prepares."""
    files: set[str] = set()
    rounds = []

    def profile(frame, event, _):
        outer = frame.f_code.co_name == "run_round"
        if event == "call":
            rounds.extend([frame] if outer else [])
            if len(rounds) == 2 and frame.f_code.co_filename.startswith(f"{SOURCE}/"):
                files.add(frame.f_code.co_filename)
        elif event == "return" and outer and len(rounds) == 2:
            sys.setprofile(None)

    sys.setprofile(profile)
    try:
        fedrema.run("fedavg", rounds=2, clients=4, backend="stacked", device="cpu", progress=False, out=folder)
    finally:
        sys.setprofile(None)
    return files


def test_number_of_files_that_a_round_passes_through(tmp_path):
    page = (ROOT / "docs" / "architecture.md").read_text()
    stated = int(re.search(r"passes through (\d+) files of `src/fedrema`", page)[1])
    assert len(files_of_a_round(tmp_path / "run")) == stated
