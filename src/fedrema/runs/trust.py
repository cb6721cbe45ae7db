"""Which runs and exports may import the code that they name: those that this user made, with that code.

A run of a user's own method, network or data function names a Python module, which is imported when the run is resumed
or its models are used. A run from somebody else could name any module in the working directory. Therefore a run carries
a mark of each module: an HMAC over the run's identity, the name and the content of the module, with a secret that only
this user can read. Without a valid mark, nothing is imported unless the user permits it.
"""

import hashlib
import hmac
import json
import os
import re
import secrets
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import platformdirs

from fedrema.base.digests import Digests, module_digests
from fedrema.base.options import class_source
from fedrema.config.settings import Settings
from fedrema.errors import BadInput

Trust = bool | Collection[str]
"""Whether code without a valid mark may be imported; or the names of the code that the user has given."""
KINDS = ("method", "net", "federation")
"""Settings that can name code, as `module:name`."""
SECRET_FILE = "run-secret"
SECRET_BYTES = 32
PERMIT = "--trust-code (trust_code=True)"
_FUNCTION = re.compile(r"[A-Za-z_]\w*(\.\w+)*:[A-Za-z_]\w*")
_given: set[tuple[str, str, str]] = set()
"""Run, kind and name of the code that was given to this process, which has imported it."""


class Untrusted(BadInput):
    """A run or an export names code that this user has not given."""


def named_code(method: str, values: Mapping[str, object]) -> dict[str, str]:
    """Return the code that settings name, by kind; `values` are settings by their names on the command line."""
    net, federation = str(values.get("net") or ""), str(values.get("federation") or "")
    is_function = _FUNCTION.fullmatch(federation) and not Path(federation).exists()
    found = {"method": method if ":" in method else "", "net": net if ":" in net else ""}
    found["federation"] = federation if is_function else ""
    return {kind: reference for kind, reference in found.items() if reference}


def given_code(method: str, settings: Settings) -> Collection[str]:
    """Return the names of the code in settings that the user has given."""
    return set(named_code(method, {"net": settings.network.net, "federation": settings.data.federation}).values())


def code_digests(kind: str, reference: str) -> Digests:
    """Return the digests of the files of a module and of its own imports, without importing anything."""
    module, _, name = reference.partition(":")
    if module != "__main__":
        return module_digests(module)
    owner = getattr(sys.modules["__main__"], name, None)
    source = class_source(owner) if isinstance(owner, type) else None
    return {} if source is None else {name: hashlib.sha256(source.encode()).hexdigest()}


def marks_of(identity: str, code: Mapping[str, str]) -> dict[str, str]:
    """Return the marks of the code that the user has given for a run, by kind; without a secret there are none."""
    marks = {}
    for kind, reference in code.items():
        _given.add((identity, kind, reference))
        if mark := _mark(identity, kind, reference, code_digests(kind, reference), create=True):
            marks[kind] = mark
    return marks


def check_code(
    where: Path,
    identity: str,
    code: Mapping[str, str],
    marks: Mapping[str, str],
    inputs: Mapping[str, Digests],
    trust: Trust,
    kinds: Sequence[str] = KINDS,
    changed: str = f"{{}} uses {{}}, but {{}} since it was written: restore the earlier version, or use {PERMIT}.",
) -> None:
    """Raise `Untrusted` if a run or an export names code that must not be imported.

    `inputs` are the digests of the code when the run was started; `changed` is the sentence about code that was changed
    since, with the folder, the code and the files.
    """
    for kind, reference in code.items():
        permitted = trust if isinstance(trust, bool) else reference in trust
        if kind not in kinds or permitted or (identity, kind, reference) in _given:
            continue
        present, mark = code_digests(kind, reference), marks.get(kind, "")
        if not present:  # nothing is imported, even if Python would find a module
            raise BadInput(
                f"{where} uses the code {reference!r}, which is not here: run the command in the folder of its module."
            )
        if mark and hmac.compare_digest(mark, _mark(identity, kind, reference, present)):
            continue
        before = inputs.get(kind, {})
        if mark and hmac.compare_digest(mark, _mark(identity, kind, reference, before)):
            raise Untrusted(changed.format(where, f"the code {reference!r}", changed_files(before, present)))
        files = ", ".join(present)
        raise Untrusted(
            f"{where} names the code {reference!r} ({files}), and does not come from this user on this machine: if you"
            f" trust this code, use {PERMIT}."
        )


def changed_files(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Return a clause that names the files that differ; empty if none does."""
    files = [name for name in dict.fromkeys((*before, *now)) if before.get(name) != now.get(name)]
    return f"{', '.join(files)} {'has' if len(files) == 1 else 'have'} changed" if files else ""


def secret_file() -> Path:
    """Return the file of this user's secret."""
    return platformdirs.user_config_path("fedrema", appauthor=False) / SECRET_FILE


def _mark(identity: str, kind: str, reference: str, digests: Digests, create: bool = False) -> str:
    """Return the mark of some code; empty without a secret, and for code that has no file."""
    secret = _secret(create) if digests else None
    if secret is None:
        return ""
    content = json.dumps([identity, kind, reference, sorted(digests.items())])
    return hmac.new(secret, content.encode(), hashlib.sha256).hexdigest()


def _secret(create: bool) -> bytes | None:
    """Return this user's secret, which is created when it is first needed; None if it cannot be read or written."""
    try:
        file = secret_file()
        if not file.is_absolute():  # without a home folder; the working directory may be somebody else's
            return None
        if create and not file.exists():
            _create(file)
        content = file.read_bytes()
    except (OSError, RuntimeError):
        return None
    return content if len(content) == SECRET_BYTES else None


def _create(file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary = file.with_name(f".{file.name}.{secrets.token_hex(8)}.part")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(secrets.token_bytes(SECRET_BYTES))
            stream.flush()
            os.fsync(stream.fileno())
        # Complete or absent, and never replaced: another process may create it at the same time.
        if not file.exists():
            os.link(temporary, file)
    except FileExistsError:
        pass
    finally:
        temporary.unlink(missing_ok=True)
