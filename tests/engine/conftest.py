"""Speeds up Triton's interpreter."""

import contextlib
import dataclasses

with contextlib.suppress(ImportError):
    from triton.runtime.interpreter import interpreter_builder

    # Half of its time goes into overflow checks whose results are used only in debug mode.
    assert not interpreter_builder.options.debug
    interpreter_builder.options = dataclasses.replace(interpreter_builder.options, sanitize_overflow=False)
