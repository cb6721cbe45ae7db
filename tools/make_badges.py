"""Draw README's badges from pyproject.toml and the code, without a badge server: `python tools/make_badges.py`."""

import tomllib
from html import escape
from pathlib import Path

from fedrema.methods import registry

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "figures" / "badges"
CHARACTER = 6.6
"""Width of a character in pixels."""


def badges() -> dict[str, tuple[str, str]]:
    """Return the two texts of each badge by its file's name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pythons = [name.rpartition(" ")[2] for name in project["classifiers"] if "Python :: 3." in name]
    torch = next(each for each in project["dependencies"] if each.startswith("torch")).removeprefix("torch")
    return {
        "python": ("Python", " | ".join(pythons)),
        "torch": ("PyTorch", torch.replace(",", ", ")),
        "licence": ("licence", project["license"]),
        "methods": ("methods", str(len(registry()))),
    }


def drawn(left: str, right: str) -> str:
    """Return a badge as SVG."""
    widths = [round(CHARACTER * len(text) + 12) for text in (left, right)]
    middle = (widths[0] / 2, widths[0] + widths[1] / 2)
    total = sum(widths)
    title = escape(f"{left}: {right}")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{total}" height="20" role="img" aria-label="{title}">'
        f"<title>{title}</title>"
        f'<rect width="{total}" height="20" rx="3" fill="#3d4450"/>'
        f'<path d="M{widths[0]} 0h{widths[1] - 3}a3 3 0 0 1 3 3v14a3 3 0 0 1 -3 3h-{widths[1] - 3}z" fill="#005a8c"/>'
        '<g fill="#fff" text-anchor="middle" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11">'
        f'<text x="{middle[0]:g}" y="14">{escape(left)}</text><text x="{middle[1]:g}" y="14">{escape(right)}</text>'
        "</g></svg>\n"
    )


def make() -> None:
    """Write all badges."""
    FOLDER.mkdir(exist_ok=True)
    for name, texts in badges().items():
        (FOLDER / f"{name}.svg").write_text(drawn(*texts))


if __name__ == "__main__":
    make()
