"""Matplotlib figures that notebooks show as pictures; importing this module takes half a second."""

import io
from pathlib import Path

from matplotlib import figure

from fedrema.base.files import atomic_file


class Figure(figure.Figure):
    """A Matplotlib figure that a notebook shows without pyplot, on a white background in every theme."""

    def _repr_png_(self) -> bytes:
        stream = io.BytesIO()
        self.savefig(stream, format="png", dpi=100)
        return stream.getvalue()

    def write(self, path: Path, dots_per_inch: int) -> None:
        """Write the figure in the format of the file's suffix, completely or not at all."""
        with atomic_file(path) as temporary:
            self.savefig(temporary, format=path.suffix.lstrip(".").lower(), dpi=dots_per_inch)
