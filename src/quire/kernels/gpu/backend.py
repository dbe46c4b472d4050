"""GPUBackend: every op of `quire.kernels.backend.Backend`, each group of them in a file of its own."""

from __future__ import annotations

from quire.kernels.backend import CollectiveOps
from quire.kernels.gpu.arrays import ArrayOps
from quire.kernels.gpu.attention import AttentionOps
from quire.kernels.gpu.experts import ExpertOps
from quire.kernels.gpu.graphs import GraphOps
from quire.kernels.gpu.interpreter import repair_interpreter
from quire.kernels.gpu.layerwise import OffloadOps
from quire.kernels.gpu.lora import LoRAOps
from quire.kernels.gpu.memory import MemoryOps
from quire.kernels.gpu.probe import interpreted
from quire.kernels.gpu.rows import RowOps
from quire.kernels.gpu.sampling import SamplingOps
from quire.kernels.gpu.states import StateOps
from quire.kernels.reference.profiling import TorchProfilingOps

if interpreted():
    repair_interpreter()


class GPUBackend(
    GraphOps,
    ExpertOps,
    LoRAOps,
    RowOps,
    AttentionOps,
    OffloadOps,
    StateOps,
    SamplingOps,
    MemoryOps,
    TorchProfilingOps,
    ArrayOps,
    CollectiveOps,
):
    """Runs on an NVIDIA GPU, or, for tests, on tensors in host memory with Triton's interpreter."""
