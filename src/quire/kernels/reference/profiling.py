"""Profiles by PyTorch's profiler, of the backends that compute with PyTorch."""

from __future__ import annotations

from pathlib import Path

import torch

from quire.kernels.backend import ProfilingOps, Trace


class TorchProfilingOps(ProfilingOps):
    """PyTorch's own trace of operators and, on a GPU, of kernels, in a file beside that of the engine."""

    _profiler: torch.profiler.profile | None = None

    def start_profile(self, trace: Trace) -> None:
        self._profiler = torch.profiler.profile()
        self._profiler.start()

    def stop_profile(self, path: Path) -> list[Path]:
        if self._profiler is None:
            return []
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        beside = path.with_name(path.name.replace(".json", ".torch.json"))
        profiler.export_chrome_trace(str(beside))
        return [beside]
