"""Arrays and numbers as JSON: sixteen bits per number in base64 take a third of the space of digits."""

import base64
from typing import Any, TypedDict

import numpy as np

UNKNOWN = 65535
"""Code of a missing value."""


class Packed(TypedDict):
    """An array in the document."""

    shape: list[int]
    highest: float
    """The value of the code 65534; 0 has the code 0."""
    data: str
    """Little-endian sixteen-bit codes in base64."""


def packed(values: np.ndarray, highest: float | None = None) -> Packed:
    """Return an array of numbers from 0 to `highest`, rounded to 1/65534 of it; NaN becomes a missing value."""
    values = np.asarray(values, np.float64)
    known = np.isfinite(values)
    top = highest if highest is not None else float(values[known].max()) if known.any() else 1.0
    scale = (UNKNOWN - 1) / top if top > 0 else 0.0
    codes = np.full(values.shape, UNKNOWN, "<u2")
    codes[known] = np.rint(np.clip(values[known] * scale, 0, UNKNOWN - 1))
    return {"shape": list(values.shape), "highest": top, "data": base64.b64encode(codes.tobytes()).decode()}


def plain(value: Any) -> Any:
    """Return a value with NumPy's numbers and arrays as Python's, and null in place of what is not finite."""
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
