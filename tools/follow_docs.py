"""Follow README and tutorial literally with a table that the documentation has not seen.

Only the names of the file, its columns and a site are replaced; `check_dist` runs this in a clean environment.
"""

import csv
import os
import re
import subprocess
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r"^```(bash|python)\n(.*?)^```$", re.S | re.M)
SITES = ("north", "harbour", "old town", "river", "hill")
TUTORIAL = {
    "nlschools.csv": "stays.csv",
    "--target lang": "--target readmitted",
    "--client-column class": "--client-column ward",
    "--clients 180": "--clients hill",
    "--client 180": "--client hill",
}
"""What a reader with another table would replace in the tutorial."""
README = {
    "lung.csv": "stays.csv",
    "--target one-year": "--target readmitted",
    "--client-column inst": "--client-column ward",
}


def write_table(path: Path) -> None:
    """Write 500 stays in five wards: numbers with gaps, a text column, and an outcome whose causes differ by ward."""
    generator = np.random.default_rng(11)
    with path.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["age", "days", "diagnosis", "blood pressure", "ward", "readmitted"])
        for number, ward in enumerate(SITES):
            for _ in range(100):
                age, days = generator.normal(60, 12), generator.gamma(2, 3)
                diagnosis = generator.choice(["heart", "lung", "other"])
                pressure = generator.normal(130, 15)
                score = (age - 60) / 6 + (1 if number < 3 else -1) * (diagnosis == "heart") * 2 - 0.5
                outcome = "yes" if score + generator.normal(0, 0.5) > 0 else "no"
                shown = "" if generator.random() < 0.1 else round(pressure)
                writer.writerow([round(age, 1), round(days, 1), diagnosis, shown, ward, outcome])


def blocks(page: Path, language: str) -> list[str]:
    """Return the blocks of a language that need nothing special."""
    return [text for found, text in FENCE.findall(page.read_text()) if found == language]


def tutorial_page() -> Path:
    """Return the tutorial, wherever it is below docs."""
    return next(
        page for page in sorted((ROOT / "docs").rglob("*.md")) if "--federation nlschools.csv" in page.read_text()
    )


def environment_with(binaries: Path) -> dict[str, str]:
    """Return an environment in which only the programs of the clean environment are new."""
    found = {**os.environ, "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}"}
    found.pop("PYTHONPATH", None)
    return found | {"PYTHONWARNINGS": "error,ignore::ResourceWarning"}


def run(binaries: Path, folder: Path, command: list[str]) -> str:
    """Run a command with the programs of the clean environment first; return what it prints."""
    ended = subprocess.run(command, cwd=folder, env=environment_with(binaries), capture_output=True, text=True)
    if ended.returncode or "Traceback" in ended.stderr:
        raise SystemExit(f"follow_docs: {command[-1]}\n{ended.stdout}\n{ended.stderr}")
    return ended.stdout


def replaced(text: str, names: dict[str, str]) -> str:
    """Return commands with other names."""
    for old, new in names.items():
        text = text.replace(old, new)
    return text


def follow_readme(binaries: Path, folder: Path) -> None:
    """Run the README's Python examples, and its commands for one's own table, if it has some."""
    write_table(folder / "stays.csv")
    page = ROOT / "README.md"
    examples = blocks(page, "python")
    for text in examples:
        run(binaries, folder, ["python", "-I", "-c", text])
    own = [text for text in blocks(page, "bash") if "--federation lung.csv" in text]
    for text in own:
        commands = "".join(line for line in text.splitlines(keepends=True) if "data --csv" not in line)
        run(binaries, folder, ["bash", "-euo", "pipefail", "-c", replaced(commands, README)])
    print(f"README: {len(examples)} Python examples, {len(own)} block(s) of commands on an unseen table.")


def follow_tutorial(binaries: Path, folder: Path) -> None:
    """Go from the unseen table to a site's model and its predictions, and check these against the outcomes."""
    write_table(folder / "stays.csv")
    commands = [text for text in blocks(tutorial_page(), "bash") if "data --csv" not in text]
    for text in commands:
        run(binaries, folder, ["bash", "-euo", "pipefail", "-c", replaced(text, TUTORIAL)])
    rows = list(csv.DictReader((folder / "predictions.csv").open()))
    given = list(csv.DictReader((folder / "new.csv").open()))
    if len(rows) != len(given) or {row["client"] for row in rows} != {"hill"}:
        raise SystemExit(f"follow_docs: predictions.csv has the rows {rows} for {given}.")
    right = accuracy(binaries, folder)
    if right < 0.75:
        raise SystemExit(f"follow_docs: the exported model of hill is right for {right:.0%} of its stays.")
    print(
        f"Tutorial: {len(commands)} blocks on an unseen table; the site's model is right for {right:.0%} of its stays."
    )


def accuracy(binaries: Path, folder: Path) -> float:
    """Return how often the exported model predicts the outcome of its site's stays, which it partly trained on."""
    lines = (folder / "stays.csv").read_text().splitlines()
    own = [line.rpartition(",") for line in lines if ",hill," in line]
    heading = lines[0].rpartition(",")[0]
    (folder / "hill.csv").write_text("\n".join([heading, *(before for before, _, _ in own)]) + "\n")
    run(
        binaries,
        folder,
        ["fedrema", "predict", "model-of-180", "hill.csv", "--client", "hill", "--out", "hill-predicted.csv"],
    )
    predicted = [row["prediction"] for row in csv.DictReader((folder / "hill-predicted.csv").open())]
    return float(np.mean([one == outcome for one, (_, _, outcome) in zip(predicted, own, strict=True)]))
