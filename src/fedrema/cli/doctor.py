"""fedrema doctor."""

import dataclasses
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import tempfile
import time
from pathlib import Path

from fedrema.cli.arguments import parse_arguments

LOW_DISK, LOW_MEMORY = 2_000_000_000, 2_000_000_000
"""Bytes below which there is advice."""
FOR_USERS = ("deploy", "privacy", "watch", "ray", "tensorboard", "mlflow", "wandb", "federations", "parquet")
"""Extras that are listed; the others are for developing fedrema."""


@dataclasses.dataclass(frozen=True)
class Doctor:
    """Check this installation: versions, devices, datasets, extras, disk and memory, with advice; train for one round.

    The exit code is 0 if the core works, even if extras or datasets are missing, and 2 if it does not.
    """

    data_dir: Path | None = None
    """Folder of the datasets. Default: $FEDREMA_DATA, otherwise the user's cache folder."""


@dataclasses.dataclass(frozen=True)
class Requirement:
    """A package that fedrema or one of its extras requires."""

    name: str
    wanted: str
    """The valid versions."""
    extra: str
    """Empty: the core."""
    found: str | None
    """The installed version."""
    is_valid: bool

    def problem(self) -> str:
        """Return what is wrong in a few words; empty if nothing is."""
        if self.found is None:
            return f"{self.name} is missing"
        return "" if self.is_valid else f"{self.name} {self.found} is installed, {self.name}{self.wanted} is needed"


def doctor(arguments: list[str]) -> int:
    """Print the checks, and advice at the end."""
    args = parse_arguments(Doctor, arguments, "fedrema doctor")
    from fedrema.base.terminal import Console

    console = Console()
    advice: list[str] = []
    needed = requirements()
    failed = [one.problem() for one in needed if not one.extra and one.problem()]
    sections = {"Versions": versions(needed)}
    if failed:
        advice.append(f"Install fedrema again (pip install fedrema): {'; '.join(failed)}.")
    else:
        sections |= {"Devices": devices(advice), "Datasets": datasets(args.data_dir)}
    sections |= {"Extras": extras(needed), "Space": space(advice)}
    if not failed:
        works, sentence = training()
        sections["Training"] = {"one round, two clients": sentence}
        if not works:
            failed.append("training")
            advice.append("Training failed: report the error above with this output.")
    for title, rows in sections.items():
        console.print(title, style="bold")
        width = max(map(len, rows), default=0)
        for name, value in rows.items():
            console.print(f"  {name:{width}}  {value}", highlight=False, soft_wrap=True)
    for sentence in advice or ["No advice: everything that was checked is in order."]:
        console.print(f"- {sentence}" if advice else sentence, highlight=False, soft_wrap=True)
    return 2 if failed else 0


def requirements() -> list[Requirement]:
    """Return the packages that this installation of fedrema requires, with the versions that are installed."""
    from packaging.requirements import Requirement as Parsed

    distribution = importlib.metadata.distribution("fedrema")
    found = []
    for text in distribution.requires or ():
        parsed = Parsed(text)
        marker = parsed.marker
        extra = ""
        if marker is not None and not marker.evaluate({"extra": ""}):
            within = [name for name in FOR_USERS if marker.evaluate({"extra": name})]
            if not within:  # another platform, or an extra for developers
                continue
            extra = within[0]
        if parsed.name == "fedrema":  # an extra that includes another
            continue
        try:
            version: str | None = importlib.metadata.version(parsed.name)
        except importlib.metadata.PackageNotFoundError:
            version = None
        is_valid = version is not None and parsed.specifier.contains(version, prereleases=True)
        found.append(Requirement(parsed.name, str(parsed.specifier), extra, version, is_valid))
    return found


def versions(needed: list[Requirement]) -> dict[str, str]:
    """Return the versions of fedrema, Python and what the core requires."""
    from fedrema import __version__

    core = {one.name: one.problem() or str(one.found) for one in needed if not one.extra}
    system = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    return {"fedrema": __version__, "Python": system, **core}


def devices(advice: list[str]) -> dict[str, str]:
    """Return the CPU and the GPUs."""
    import torch

    from fedrema.base.memory import amount

    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found = {"CPU": f"{usable} cores, {torch.get_num_threads()} threads per operation"}
    for number in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(number)
        found[f"cuda:{number}"] = f"{facts.name}, {amount(facts.total_memory)}"
    if not torch.cuda.is_available():
        found["GPU"] = "none that PyTorch can use"
        if shutil.which("nvidia-smi"):
            advice.append("PyTorch cannot use this machine's NVIDIA GPU: install its CUDA build, from pytorch.org.")
    elif importlib.util.find_spec("triton") is None:
        advice.append("Triton is missing, so that training on the GPU is slower: pip install triton.")
    return found


def datasets(data_dir: Path | None) -> dict[str, str]:
    """Return where each dataset is."""
    from fedrema.cli.data import location
    from fedrema.data import dataset_status

    return {status.name: location(status) for status in dataset_status(data_dir)}


def extras(needed: list[Requirement]) -> dict[str, str]:
    """Return for each extra whether its packages are installed."""
    found = {}
    for extra in FOR_USERS:
        problems = [problem for one in needed if one.extra == extra and (problem := one.problem())]
        found[extra] = f"{'; '.join(problems)}: pip install 'fedrema[{extra}]'" if problems else "installed"
    return found


def space(advice: list[str]) -> dict[str, str]:
    """Return the free disk space and memory."""
    from fedrema.base.memory import amount, free_memory

    disk, memory = shutil.disk_usage(Path.cwd()).free, free_memory()
    if disk < LOW_DISK:
        advice.append(f"Only {amount(disk)} are free on the disk of the current folder, in which runs/ is created.")
    if memory < LOW_MEMORY:
        advice.append(f"Only {amount(memory)} of memory are free: use --memory or --chunk for many clients.")
    return {"disk of the current folder": f"{amount(disk)} free", "memory": f"{amount(memory)} free"}


def training() -> tuple[bool, str]:
    """Train FedReMa for one round in a temporary folder; return whether it works, and a sentence."""
    import fedrema

    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        try:
            run = fedrema.run("fedrema", clients=2, samples=20, rounds=1, out=Path(folder) / "run", progress=False)
            predicted = run.clients["0"].predict(fedrema.make_federation(clients=1, samples=20).x[:2]).values
            works = run.finished and len(predicted) == 2
        except Exception as error:  # any: its text is what a report of the fault needs
            return False, f"{type(error).__name__}: {error}"
    return works, f"works ({time.perf_counter() - started:.1f} s)" if works else "returned no predictions"
