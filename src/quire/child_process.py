"""How further processes of ours are started: by module name, with the package where this one has it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def start_module(module: str, **options: Any) -> subprocess.Popen[bytes]:
    """Start `python -m module`; the package is found also where it is not installed. `options`: of `Popen`."""
    root = str(Path(__file__).resolve().parents[1])
    path = os.environ.get("PYTHONPATH")
    environment = dict(os.environ, PYTHONPATH=root + (os.pathsep + path if path else ""))
    return subprocess.Popen([sys.executable, "-m", module], env=environment, **options)
