"""Triton's interpreter, in less time."""

import contextlib
import dataclasses

with contextlib.suppress(ImportError):
    from triton.runtime.interpreter import interpreter_builder

    # It computes whether integers overflow, for half of its time, and looks at that only when it debugs.
    assert not interpreter_builder.options.debug
    interpreter_builder.options = dataclasses.replace(interpreter_builder.options, sanitize_overflow=False)
