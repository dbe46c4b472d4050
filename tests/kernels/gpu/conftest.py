"""`--kernel-checks`: tests of this folder under `tests/helpers/kernel_checks.py`; nothing where there is a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

CHECKED = ("test_kernel_checks.py", "test_far.py")  # by themselves, always
NOTES = pytest.StashKey[dict[tuple[str, ...], str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kernel-checks", action="store_true", help="check what kernels do to memory, in the interpreter")


@pytest.fixture(autouse=True)
def _kernel_checks(request: pytest.FixtureRequest) -> Iterator[None]:
    asked = request.config.getoption("--kernel-checks", False) and not torch.cuda.is_available()
    if not asked or request.path.name in CHECKED:
        yield
        return
    from tests.helpers.kernel_checks import kernel_checks

    with kernel_checks() as findings:
        yield
    notes = request.config.stash.setdefault(NOTES, {})
    for key, text in findings.notes.items():
        notes.setdefault(key, f"{text} ({request.node.nodeid})")
    assert not findings.errors, f"\n{findings}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if notes := config.stash.get(NOTES, {}):
        terminalreporter.section("kernel checks: what may be meant")
        for text in sorted(notes.values()):
            terminalreporter.line(text)
