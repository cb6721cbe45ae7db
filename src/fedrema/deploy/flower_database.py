"""Fewer and shorter transactions of Flower's SuperLink in its SQLite database, and less memory for it.

Every part of a message is one HTTP request, and the SuperLink looks for expired tasks in each of them, which is a write
transaction. SQLite allows one writer at a time; a thread that finds another one writing sleeps for up to 0.1 s before
it tries again, so that with many nodes most of a round was spent sleeping.

Every connection to the database may use 64 MB of memory and map 256 MB of the file. The SuperLink has several of them,
and reads each part of a message once or twice only.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from flwr.supercore import sql_mixin
from flwr.supercore.constant import SQLITE_PRAGMAS
from flwr.supercore.corestate.sql_corestate import SqlCoreState
from flwr.supercore.sql_mixin import SqlMixin
from sqlalchemy.orm import Session

SECONDS_BETWEEN_CLEANUPS = 1.0
"""Interval at which the SuperLink looks for expired tasks; they expire after a minute."""
MEMORY_OF_A_CONNECTION = {"cache_size": "-8000", "mmap_size": "16777216"}
"""Values of SQLite: 8 MB of memory, and 16 MB of the file."""


def limit_memory() -> None:
    """Let later connections of this process to the database use less memory."""
    assert dict(SQLITE_PRAGMAS).keys() >= MEMORY_OF_A_CONNECTION.keys()
    assert "SQLITE_PRAGMAS" in vars(sql_mixin)
    vars(sql_mixin)["SQLITE_PRAGMAS"] = tuple((dict(SQLITE_PRAGMAS) | MEMORY_OF_A_CONNECTION).items())


def shorten_transactions() -> None:
    """Let threads of this process wait for each other instead of for the database, and clean up less often."""
    lock, last = threading.RLock(), 0.0
    open_session, clean_up = SqlMixin.session, SqlCoreState._cleanup_expired_task_tokens

    @contextmanager
    def session(self: SqlMixin) -> Iterator[Session]:
        with lock, open_session(self) as opened:
            yield opened

    def clean_up_sometimes(self: SqlCoreState) -> None:
        nonlocal last
        if time.monotonic() - last >= SECONDS_BETWEEN_CLEANUPS:
            last = time.monotonic()
            clean_up(self)

    # Both are replaced as attributes because Flower creates its states itself.
    vars_to_set = ((SqlMixin, "session", session), (SqlCoreState, "_cleanup_expired_task_tokens", clean_up_sometimes))
    for owner, name, function in vars_to_set:
        setattr(owner, name, function)
