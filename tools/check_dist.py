"""Build wheel and sdist, and test them in a clean environment: files, metadata, one command per family, the tutorial.

    python tools/check_dist.py [--keep FOLDER]

The environment is a new virtual environment that contains only the wheel and what it requires, in the versions of
constraints.txt; the commands run in an empty folder outside of the repository.
"""

import argparse
import email
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

from follow_docs import environment_with, follow_readme, follow_tutorial
from packaging.metadata import Metadata

ROOT = Path(__file__).parents[1]
NOT_IN_CORE = ("plotly", "starlette", "uvicorn", "flwr", "ray", "pandas")
PYTORCH = ("torch", "torchgen", "functorch", "nvidia", "triton")
COMMANDS = """
fedrema --version
fedrema doctor
fedrema completion bash
fedrema run --rounds 3 --seeds 1 --out runs/demo
fedrema run fedrema --rounds 3 --out runs/first
fedrema resume runs/first --rounds 4
fedrema compare runs/demo
fedrema report runs/demo runs/first
fedrema verdict runs/demo
fedrema methods fedrema
fedrema data
fedrema partition --clients 4 --save four.npz --plot four.png
fedrema predict runs/first four.npz
fedrema export runs/first
fedrema personalize runs/first --data one.npz
fedrema leaderboard
fedrema reproduce table5 --smoke --plan --out results
fedrema grid grid.toml --out results/grid
fedrema bench --network mlp --clients 4 --rounds 1
"""
REFUSED = {
    "fedrema watch runs": "pip install 'fedrema[watch]'",
    "fedrema deploy demo runs/deployed fedrema": "pip install 'fedrema[deploy]'",
    "fedrema run fedavg --rounds 1 --track wandb --out runs/tracked": "pip install 'fedrema[wandb]'",
}
"""Commands that need an extra, and the remedy that they name."""
GRID = """
title = "One cell"
seeds = 1

[settings]
rounds = 1
clients = 4

[columns.only]
title = "Digits"

[rows.fedavg]
title = "FedAvg"
"""
ONE_CLIENT = """
import fedrema, numpy
made = fedrema.make_federation(clients=1, samples=40, partition="iid")
numpy.savez("one.npz", x=made.x, y=made.y)
"""


def main() -> None:
    """Build, install and check; exit with an error at the first fault."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keep", type=Path, help="use this folder for the environment, and keep it")
    kept = parser.parse_args().keep
    wheel, sdist = build()
    check_files(wheel, sdist)
    check_metadata(wheel)
    with tempfile.TemporaryDirectory() as temporary:
        folder = (kept or Path(temporary)).resolve()
        binaries = install(wheel, folder / "environment")
        for name in ("commands", "readme", "tutorial"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        run_commands(binaries, folder / "commands")
        follow_readme(binaries, folder / "readme")
        follow_tutorial(binaries, folder / "tutorial")
    print(f"{wheel.name} and {sdist.name} passed.")


def build() -> tuple[Path, Path]:
    """Build both into dist/, the wheel from the sdist."""
    for old in (ROOT / "dist").glob("fedrema-*"):
        old.unlink()
    subprocess.run(
        [sys.executable, "-m", "build", "--outdir", "dist", "."], cwd=ROOT, check=True, stdout=subprocess.DEVNULL
    )
    (wheel,), (sdist,) = ((ROOT / "dist").glob(pattern) for pattern in ("*.whl", "*.tar.gz"))
    return wheel, sdist


def check_files(wheel: Path, sdist: Path) -> None:
    """Check that no file of the package is missing, and that nothing else is in the wheel."""
    listed = subprocess.run(["git", "ls-files", "src"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    wanted = {path.removeprefix("src/") for path in listed.splitlines()}
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if not name.partition("/")[0].endswith(".dist-info")}
        licences = {name for name in archive.namelist() if "/licenses/" in name}
    require(packed == wanted, f"The wheel lacks {sorted(wanted - packed)} and has {sorted(packed - wanted)}.")
    require(len(licences) == 2, f"The wheel has the licences {sorted(licences)}.")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    missing = [name for name in ("LICENSE", "README.md", "pyproject.toml", *listed.splitlines()) if name not in names]
    require(not missing, f"The sdist lacks {missing}.")
    sizes = [file.stat().st_size / 1e6 for file in (wheel, sdist)]
    print(f"Files: {len(packed)} in the wheel ({sizes[0]:.1f} MB; sdist {sizes[1]:.1f} MB).")


def check_metadata(wheel: Path) -> None:
    """Check that the metadata is valid and complete."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        text = archive.read(name)
    found = Metadata.from_email(text, validate=True)
    require(found.license_expression == "Apache-2.0 AND MIT", f"Licence {found.license_expression}.")
    for field in ("summary", "description", "keywords", "classifiers", "requires_python", "author"):
        require(bool(getattr(found, field) or email.message_from_bytes(text)["Author"]), f"No {field} in the metadata.")
    versions = {word for word in found.classifiers or () if word.startswith("Programming Language :: Python :: 3.")}
    require(len(versions) == 3, f"Classifiers name {versions}.")


def install(wheel: Path, environment: Path) -> Path:
    """Install the wheel into a new environment; return the folder of its programs."""
    venv.create(environment, with_pip=True, clear=True)
    binaries = environment / "bin"
    pip = [binaries / "python", "-m", "pip"]
    subprocess.run([*pip, "install", "--quiet", "--constraint", ROOT / "constraints.txt", wheel], check=True)
    subprocess.run([*pip, "check"], check=True, stdout=subprocess.DEVNULL)
    (packages,) = environment.glob("lib/python*/site-packages")
    for name in NOT_IN_CORE:
        require(not (packages / name).exists(), f"{name} is installed, but the core must not need it.")
    total, torch = size(packages), sum(size(packages / name) for name in PYTORCH)
    print(f"Installed: {(total - torch) / 1e6:.0f} MB without torch, {torch / 1e6:.0f} MB of torch.")
    return binaries


def size(folder: Path) -> int:
    """Return the bytes of all files below a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def run_commands(binaries: Path, folder: Path) -> None:
    """Run one command per family, and those that must name the extra that they need."""
    (folder / "grid.toml").write_text(GRID)
    commands = COMMANDS.strip().splitlines()
    environment = environment_with(binaries)
    subprocess.run([binaries / "python", "-I", "-c", ONE_CLIENT], cwd=folder, check=True)
    for command in commands:
        ended = subprocess.run(command.split(), cwd=folder, env=environment, capture_output=True, text=True)
        require(ended.returncode == 0 and "Traceback" not in ended.stderr, f"{command}\n{ended.stdout}\n{ended.stderr}")
    for command, remedy in REFUSED.items():
        ended = subprocess.run(command.split(), cwd=folder, env=environment, capture_output=True, text=True)
        require(ended.returncode == 2 and remedy in ended.stderr, f"{command}\n{ended.stdout}\n{ended.stderr}")
    require("</html>" in (folder / "runs" / "demo" / "report.html").read_text()[-20:], "The report is not complete.")
    print(f"Commands: {len(commands)} run, {len(REFUSED)} name their extra.")


def require(holds: bool, sentence: str) -> None:
    """Exit with a sentence unless a condition holds."""
    if not holds:
        sys.exit(f"check_dist: {sentence}")


if __name__ == "__main__":
    main()
