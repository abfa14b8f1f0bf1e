"""What signals do while processes are started and ended, and that none of those outlives its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dsafuse import stopping

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SLEEP = "import time; time.sleep(600)"


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    """As a shell starts a command in the foreground; one in the background ignores SIGINT. They are back afterwards."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        assert number == signal.SIGINT or signal.getsignal(number) == signal.SIG_DFL
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_each_signal_interrupts(number: signal.Signals) -> None:
    with pytest.raises(KeyboardInterrupt), stopping.interrupted():
        signal.raise_signal(number)


def test_a_second_signal_does_not_cut_what_the_first_began() -> None:
    """SIGHUP and SIGTERM of a terminal that closes: the second comes while all is put in order."""
    done = []

    def work() -> None:
        try:
            signal.raise_signal(signal.SIGHUP)
        finally:
            signal.raise_signal(signal.SIGTERM)
            done.append("in order")

    with pytest.raises(KeyboardInterrupt), stopping.interrupted():
        work()
    assert done == ["in order"]


@pytest.mark.parametrize("number", SIGNALS)
def test_a_held_signal_acts_behind_the_block(number: signal.Signals) -> None:
    done = []

    def work() -> None:
        with stopping.interrupted(), stopping.held() as stopped:
            done.append(stopped())
            signal.raise_signal(number)
            signal.raise_signal(signal.SIGTERM)
            done.append(stopped())

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == [False, True]


def test_a_held_signal_acts_behind_a_block_that_fails() -> None:
    def work() -> None:
        with stopping.held():
            signal.raise_signal(signal.SIGINT)
            raise ValueError

    with pytest.raises(KeyboardInterrupt):
        work()


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with stopping.interrupted(), stopping.held() as stopped:
        signal.raise_signal(signal.SIGINT)
        assert not stopped()


def test_a_thread_that_gets_no_signals_holds_none() -> None:
    found = []

    def work() -> None:
        with stopping.interrupted(), stopping.held() as stopped:
            found.append(stopped())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [False]


@contextmanager
def session(code: str) -> Iterator[subprocess.Popen[str]]:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], start_new_session=True, text=True, **pipes) as leader:
        try:
            yield leader
        finally:
            leader.kill()


def started(code: str, **options: object) -> str:
    """Code that starts a process."""
    return f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {code!r}], **{options!r})"


@pytest.mark.parametrize("leader", ["lives", "has ended"])
def test_what_a_process_started_ends_with_it(leader: str) -> None:
    """Its own child holds the pipe open: that it is closed shows that nobody is left."""
    start = f"{started(SLEEP)}; print(1, flush=True)"
    with session(f"{start}; {SLEEP}" if leader == "lives" else start) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "1\n"
        if leader != "lives":
            process.wait()
        assert stopping.running(process.pid)
        stopping.end(process)
        assert not stopping.running(process.pid)
        assert process.stdout.read() == ""


def test_a_process_that_ends_by_itself_is_waited_for() -> None:
    with session("import time; time.sleep(0.3)") as process:
        stopping.end(process, time.monotonic() + 60)
    assert process.returncode == 0


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="zombies are known by /proc")
def test_a_zombie_is_no_process_that_runs() -> None:
    """As in a container whose first process collects none."""
    # A parent in another group that collects none until its input ends.
    parent = "import subprocess, sys, os; group = os.getppid(); "
    parent += f"subprocess.Popen([sys.executable, '-c', {SLEEP!r}], process_group=group); print(1, flush=True); "
    parent += "sys.stdin.read()"
    with session(f"{started(parent, process_group=0)}; {SLEEP}") as leader:
        assert leader.stdout is not None
        assert leader.stdout.readline() == "1\n"
        start = time.monotonic()
        stopping.end(leader)
        assert time.monotonic() - start < stopping.GRACE_SECONDS
        os.killpg(leader.pid, 0)  # it is there, in name
        assert not stopping.running(leader.pid)


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("RuntimeError: no weights", "RuntimeError: no weights"),
        ("(Worker pid=7) ERROR 11-30 10:00:00 [core.py:12] RuntimeError: no weights", "RuntimeError: no weights"),
        ("[rank0]: torch.OutOfMemoryError: CUDA out of memory", "torch.OutOfMemoryError: CUDA out of memory"),
        ("AssertionError", "AssertionError"),
        ("    except ImportError:", None),
        ('    raise ValueError("no")', None),
        ("ERROR: no", None),
        ("RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}", None),
        ("Exception: WorkerProc initialization failed. See stack trace for root cause.", None),
        ('INFO: "POST / HTTP/1.1" 500 Internal Server Error', None),
        ("ValueError: ", None),
    ],
)
def test_the_last_error_of_a_log_is_found_behind_whatever_stands_before_it(line: str, error: str | None) -> None:
    log = ["KeyError: 1", line, *map(str, range(60))]
    why = error or "KeyError: 1"
    assert stopping.last_words("it ended", "\n".join(log), "x.log").splitlines() == [
        f"it ended ({why}); the end of x.log:",
        *log[-stopping.TAIL_LINES :],
    ]
    assert stopping.last_words("it ended", "nothing").splitlines()[0] == "it ended; the end of its log:"
    assert len(stopping.last_words("it ended", "x" * 10_000)) < 2 * stopping.LINE_CHARACTERS


def test_a_child_that_a_signal_ended_is_said_to_be() -> None:
    assert [stopping.how_ended(code) for code in (3, -9)] == ["ended with exit code 3", "was ended by signal 9"]
