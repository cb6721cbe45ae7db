"""LaTeX tables, for the package booktabs."""

from collections.abc import Sequence

SPECIAL = {
    "\\": r"\textbackslash{}",
    **{character: f"\\{character}" for character in "&%_#${}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "×": r"$\times$",
    "²": "$^2$",
    "–": "--",
    "…": r"\dots{}",
    **{
        letter: f"$\\{name}$"
        for letter, name in zip(
            "αβγδεηλμρστ",
            ["alpha", "beta", "gamma", "delta", "epsilon", "eta", "lambda", "mu", "rho", "sigma", "tau"],
            strict=True,
        )
    },
}


def escaped(text: str) -> str:
    """Return text with LaTeX's special characters escaped."""
    return "".join(SPECIAL.get(character, character) for character in text)


def tabular(headings: Sequence[str], rows: Sequence[Sequence[str]], columns: str) -> list[str]:
    """Return the lines of a table from cells in LaTeX; `columns` is their alignment."""
    lines = [" & ".join(cells) + r" \\" for cells in (headings, *rows)]
    return [
        rf"\begin{{tabular}}{{{columns}}}",
        r"\toprule",
        lines[0],
        r"\midrule",
        *lines[1:],
        r"\bottomrule",
        r"\end{tabular}",
    ]
