"""Being stopped, and stopping others: signals that end this process, and processes that must not outlive it.

And what is said of one that ended by itself.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

GRACE_SECONDS = 15.0
"""What processes get to be gone after they were asked, or killed."""

TAIL_LINES = 20
"""Of a log, shown where a process ended badly."""

# At the end of a line, or with words behind it; behind a name, a rank or a time that a logger has put before it.
_ERROR = re.compile(r"(?:^|\s)([\w.]*(?:Error|Exception): \S.*|[\w.]*\w(?:Error|Exception)$)")
# What processes say that were waiting for the one that failed; vLLM's.
_POINTS_ELSEWHERE = re.compile(r"[Ss]ee .*root cause")
LOG_FOLLOWS = "; the end of "
"""Between what happened and, below, the end of a log."""
LINE_CHARACTERS = 1000
"""Of a line that is shown, at most."""

Handler = Callable[[int, Any], object]


@contextmanager
def handling(handler: Handler) -> Iterator[None]:
    """Hand Ctrl-C, SIGTERM (a time limit) and SIGHUP (the terminal has gone) to a handler.

    One that this process was started to ignore, as under nohup, stays ignored. Only the main thread has handlers:
    elsewhere nothing is handed over.
    """
    before: dict[int, Any] = {}
    try:
        if threading.current_thread() is threading.main_thread():
            for name in ("SIGINT", "SIGTERM", "SIGHUP"):
                number = getattr(signal, name, None)  # Windows has no SIGHUP
                if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
                    before[number] = signal.signal(number, handler)
        yield
    finally:
        for number, each in before.items():
            signal.signal(number, each)


@contextmanager
def interrupted() -> Iterator[None]:
    """Let the first of them do what Ctrl-C does: KeyboardInterrupt, so that all is put in order.

    What the first began a second does not cut short: a terminal that closes sends SIGHUP, and then SIGTERM.
    """
    came: list[int] = []

    def first(number: int, frame: Any) -> None:
        came.append(number)
        if len(came) == 1:
            signal.default_int_handler(number, frame)

    with handling(first):
        yield


@contextmanager
def held() -> Iterator[Callable[[], bool]]:
    """Hold the signals back, and let the first act behind the block; yields whether one came.

    An exception between the start of a process and the line that remembers it would leave one that nobody ends.
    """
    came: list[int] = []
    try:
        with handling(lambda number, _: came.append(number)):
            yield lambda: bool(came)
    finally:
        if came:
            signal.raise_signal(came[0])


def end(leader: subprocess.Popen[str], deadline: float = 0.0) -> None:
    """Wait for the leader of a session until time.monotonic() passes the deadline; then kill all that is left of it.

    When it returns, none of its group runs. A zombie runs no more, whenever init collects it.
    """
    with suppress(subprocess.TimeoutExpired):
        leader.wait(max(0.0, deadline - time.monotonic()))
    with suppress(ProcessLookupError):
        os.killpg(leader.pid, signal.SIGKILL)
    leader.wait()
    patience = time.monotonic() + GRACE_SECONDS
    while running(leader.pid) and time.monotonic() < patience:
        time.sleep(0.01)


def last_words(what: str, said: str, log: object = "its log") -> str:
    """What happened to a process, the last error that it logged, and below them the end of its log.

    Libraries have more to say when a process ends: what it died of may stand far above.
    """
    lines = [line[:LINE_CHARACTERS] for line in said.splitlines()]
    errors = [found[1] for line in lines if (found := _ERROR.search(line)) and not _POINTS_ELSEWHERE.search(line)]
    why = f" ({errors[-1]})" if errors else ""
    return "\n".join([f"{what}{why}{LOG_FOLLOWS}{log}:", *lines[-TAIL_LINES:]])


def how_ended(code: int) -> str:
    """What an exit code says of a child."""
    return f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"


def running(group: int) -> bool:
    """Whether any process of a group has yet to end."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    states = [_state(path, group) for path in Path("/proc").glob("[0-9]*/stat")]
    return not states or any(state not in (None, "Z", "X") for state in states)  # without /proc zombies count


def _state(stat: Path, group: int) -> str | None:
    """The state of a process of this group; None for any other, and for one that has gone meanwhile."""
    try:
        state, _, of = stat.read_text(errors="replace").rpartition(")")[2].split()[:3]
    except OSError:
        return None
    return state if int(of) == group else None
