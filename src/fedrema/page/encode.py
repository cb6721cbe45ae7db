"""Arrays in a JSON document: sixteen bits a number, as text; a third of the room that digits take."""

import base64
from typing import Any

import numpy as np

UNKNOWN = 65535
"""Stands for what was not measured."""


def packed(values: np.ndarray, highest: float | None = None) -> dict[str, Any]:
    """Return an array of numbers from 0 to `highest`, rounded to a 65,534th of it; NaN stays unknown."""
    values = np.asarray(values, np.float64)
    known = np.isfinite(values)
    top = highest if highest is not None else float(values[known].max()) if known.any() else 1.0
    scale = (UNKNOWN - 1) / top if top > 0 else 0.0
    small = np.full(values.shape, UNKNOWN, "<u2")
    small[known] = np.rint(np.clip(values[known] * scale, 0, UNKNOWN - 1))
    return {"shape": list(values.shape), "highest": top, "data": base64.b64encode(small.tobytes()).decode()}


def plain(value: Any) -> Any:
    """Return what JSON can hold in place of NumPy's numbers; what is not finite becomes null."""
    if isinstance(value, dict):
        return {str(name): plain(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, float):
        return value if np.isfinite(value) else None
    return value
