"""Processes that are started here, and that are gone when we are: each leads a group, and a group is ended whole."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from dsafuse import stopping


class Ended(Exception):
    """A process ended that should not have; the message has the last error of its log, and its last lines."""


class Stopped(Exception):
    """Somebody asked us to stop, by this signal."""

    def __init__(self, number: int) -> None:
        super().__init__(f"it was stopped by {signal.Signals(number).name}")
        self.exit_code = 128 + number


class Process:
    """A child in a session of its own, so that a Ctrl-C at the terminal reaches us and not it.

    Args:
        name: for messages.
        command, environment: of the child.
        log: where its standard error goes, and its standard output unless `pipes`; appended to.
        pipes: standard input and output are pipes (text).
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        *,
        pipes: bool = False,
    ) -> None:
        self.name = name
        self.command = list(command)
        self.log = log
        self._log_start = log.stat().st_size if log.exists() else 0
        with log.open("ab") as file:
            self._child = subprocess.Popen(
                self.command,
                env=dict(environment),
                stdin=subprocess.PIPE if pipes else subprocess.DEVNULL,
                stdout=subprocess.PIPE if pipes else file,
                stderr=file,
                text=True,
                start_new_session=True,
            )

    @property
    def stdin(self) -> IO[str]:
        """The child's standard input."""
        assert self._child.stdin is not None
        return self._child.stdin

    @property
    def stdout(self) -> IO[str]:
        """The child's standard output."""
        assert self._child.stdout is not None
        return self._child.stdout

    @property
    def exit_code(self) -> int | None:
        """The child's exit code, once it has ended."""
        return self._child.poll()

    def said(self) -> str:
        """What this child has logged so far."""
        with self.log.open("rb") as file:
            file.seek(self._log_start)
            return file.read().decode(errors="replace")

    def check(self) -> None:
        """Raise Ended if the child is no longer there."""
        code = self._child.poll()
        if code is not None:
            raise Ended(stopping.last_words(f"{self.name} {stopping.how_ended(code)}", self.said(), self.log))

    def ask(self) -> None:
        """Ask the child to end."""
        with suppress(ProcessLookupError):
            self._child.terminate()

    def end(self, deadline: float) -> None:
        """Wait for the child until time.monotonic() passes the deadline, then kill all that is left of its group."""
        stopping.end(self._child, deadline)


def end_all(processes: Sequence[Process]) -> None:
    """End processes, all at once."""
    for process in processes:
        process.ask()
    deadline = time.monotonic() + stopping.GRACE_SECONDS
    for process in processes:
        process.end(deadline)


@contextmanager
def listening() -> Iterator[Callable[[], None]]:
    """Hear the signals that stop us; yields what raises Stopped once one of them came.

    Nothing is raised in the middle of anything: neither starting a process nor ending one can be cut in two.
    """
    heard: list[int] = []

    def check() -> None:
        if heard:
            raise Stopped(heard[0])

    with stopping.handling(lambda number, _: heard.append(number)):
        yield check
