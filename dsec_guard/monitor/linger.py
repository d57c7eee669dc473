"""An attachment that outlives its last user for a moment.

Attaching to sys_exit takes 2 to 3 ms, as long as a short box: the kernel has to touch every task. While it lasts, every
system call of the host pays 0.1 us. So it is kept between boxes that follow each other, and ended when none comes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

L = TypeVar("L")


class Lingering(Generic[L]):
    """Made by `attach` at the first `want`, ended by `detach` `linger_s` seconds after `unwant`; 0: at once.

    `want` and `unwant` alternate. Only the thread that waits out the seconds works beside the caller's.
    """

    def __init__(self, attach: Callable[[], L], detach: Callable[[L], None], linger_s: float) -> None:
        self._attach = attach
        self._detach = detach
        self._linger_s = linger_s
        self._held: L | None = None
        self._wanted = False
        self._uses = 0
        self._closed = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    @property
    def attached(self) -> bool:
        return self._held is not None

    def want(self) -> None:
        """Attached when this returns. Raises: what `attach` does; nothing has changed then."""
        with self._changed:
            if self._held is None:
                self._held = self._attach()
            self._wanted = True
            self._uses += 1

    def unwant(self) -> None:
        """The last user is gone."""
        with self._changed:
            self._wanted = False
            if self._linger_s <= 0:
                self._end()
            elif self._thread is None:
                self._thread = threading.Thread(target=self._wait_out, name="dsec-guard-linger", daemon=True)
                self._thread.start()
            else:
                self._changed.notify()

    def close(self) -> None:
        """Detach now, whoever uses it. Repeating is harmless."""
        with self._changed:
            self._closed, self._wanted = True, False
            self._end()
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _idle(self) -> bool:
        return self._held is not None and not self._wanted

    def _end(self) -> None:
        if self._held is not None:
            held, self._held = self._held, None
            self._detach(held)

    def _wait_out(self) -> None:
        with self._changed:
            while not self._closed:
                if not self._idle():
                    self._changed.wait()
                    continue
                before = self._uses
                self._changed.wait(self._linger_s)
                if self._idle() and self._uses == before:
                    self._end()
