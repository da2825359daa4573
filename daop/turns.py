"""One caller at a time: generations of several threads follow each other instead of mixing."""

from __future__ import annotations

from threading import Lock, get_ident
from types import TracebackType

from daop.core import DaopError


class Turns:
    """A context that one thread at a time is in. Others wait; who would wait for itself is told so."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._inside = 0  # the thread that is in, 0: none

    def __enter__(self) -> None:
        if self._inside == get_ident():
            raise DaopError(
                "a generation was asked for from within another of the same runtime (in on_text, say): let "
                "that one end first"
            )
        self._lock.acquire()
        self._inside = get_ident()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._inside = 0
        self._lock.release()
