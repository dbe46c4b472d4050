"""Children are tied to their parent, and leave to it what reaches all processes of a group."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from quire.child_process import GROUP_SIGNALS, start_module_here

SECONDS = 1.0


@pytest.mark.parametrize("number", GROUP_SIGNALS)
def test_signals_of_the_group_end_no_child_from_its_first_moment_on(number: int) -> None:
    child = start_module_here("tests.supervisor.fake_front", "child", stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline and child.poll() is None:
        child.send_signal(number)
        time.sleep(0.001)
    ended = child.poll()
    child.kill()
    assert (ended, child.communicate()[1]) == (None, b"")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_signals_stay_blocked() -> None:
    """Else what a child starts, such as a compiler, could not be interrupted."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    child = start_module_here("tests.supervisor.fake_front", "child", stdin=subprocess.DEVNULL)
    try:
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
        status = Path(f"/proc/{child.pid}/status")
        deadline = time.monotonic() + 10.0
        while int(re.findall(r"SigBlk:\s*(\w+)", status.read_text())[0], 16):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        child.kill()
        child.wait()
