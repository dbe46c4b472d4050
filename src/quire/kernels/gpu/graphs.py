"""CUDA graphs: a step of one shape recorded once, whole or in pieces, and run again.

A shape's first step is computed op by op, so that it waits for nothing but kernels to be compiled. Its second is, too,
on the stream that captures, and then recorded: while graphs are captured nothing is computed, so that each step is
computed exactly once. From the third on the recording runs. `graphs_pieces.py` says what pieces are, and
`graphs_shapes.py` which shapes there are.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from triton.errors import TritonError

from quire.kernels.backend import Arrays, AttentionMetadata
from quire.kernels.gpu.arrays import ArrayOps
from quire.kernels.gpu.graphs_compile import Ahead, mark, marker
from quire.kernels.gpu.graphs_cuda import CudaRecorder
from quire.kernels.gpu.graphs_pieces import Graph, Pieces
from quire.kernels.gpu.graphs_shapes import Ladder
from quire.kernels.gpu.graphs_staging import PackedStager
from quire.kernels.gpu.probe import interpreted
from quire.kernels.steps import GraphStats, Stager, StepShape
from quire.version import __version__

logger = logging.getLogger(__name__)


class Recording:
    """A step of one shape, called with its metadata if it is recorded in pieces."""

    def __init__(self, owner: GraphOps, build: Callable[..., Arrays], in_pieces: bool) -> None:
        self._owner, self._build, self._in_pieces = owner, build, in_pieces
        self._calls = 0
        self._run: Callable[..., None] | None = None
        self._outputs: Arrays = ()
        self.graphs: list[Graph] = []
        self.seconds, self.nbytes, self.failed = 0.0, 0, False

    def __call__(self, *metadata: AttentionMetadata) -> Arrays:
        """Compute a step, in this or that way; what is returned is overwritten by the next recording that runs."""
        if self._run is not None:
            self._run(*metadata)
            return self._outputs
        self._calls += 1
        recorder = self._owner.recorder
        if recorder is None or self.failed or self._calls == 1:
            return self._build(*metadata)
        with recorder.aside():
            outputs = self._build(*metadata)
        started, taken = time.perf_counter(), recorder.taken()
        try:
            with recorder.recording():
                self._record(recorder, *metadata)
        except (RuntimeError, TritonError) as error:
            self.failed, self.graphs = True, []
            logger.warning("a step could not be recorded and stays slower than it might be: %s", _cause(error))
        self.seconds, self.nbytes = time.perf_counter() - started, max(0, recorder.taken() - taken)
        return outputs

    def _record(self, recorder: Any, *metadata: AttentionMetadata) -> None:
        if self._in_pieces:
            self._record_pieces(recorder, metadata[0])
            return
        graph = recorder.begin()
        try:
            outputs = self._build()
        finally:
            recorder.end(graph)
        self._outputs = _aliases(recorder, outputs)
        self.graphs, self._run = [graph], graph.replay

    def _record_pieces(self, recorder: Any, metadata: AttentionMetadata) -> None:
        pieces = Pieces(recorder, metadata)
        self._owner.pieces = pieces
        pieces.begin()
        try:
            outputs = self._build(metadata)
        finally:
            self._owner.pieces = None
            pieces.end()
        pieces.finish()
        self._outputs = _aliases(recorder, outputs)
        self.graphs, self._run = pieces.graphs, pieces.run


def _cause(error: BaseException) -> BaseException:
    """Return the first of a chain of errors: one that breaks a capture makes its end fail, too."""
    while error.__context__ is not None:
        error = error.__context__
    return error


def _aliases(recorder: Any, outputs: Arrays) -> Arrays:
    """Return the outputs of a recording without keeping their memory from the recordings to come."""
    return tuple(None if output is None else recorder.alias(output) for output in outputs)


class GraphOps(ArrayOps):
    """Recordings.

    Attributes:
        recorder: makes them, see `new_recorder`; None with `enforce_eager`, and in Triton's interpreter.
        pieces: the recording in pieces that is being made, or None.
    """

    pads = True
    pieces: Pieces | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.recorder: Any = None if self.enforce_eager else self.new_recorder()
        self._ladder = Ladder(self.max_graph_tokens)
        self._recordings: weakref.WeakSet[Recording] = weakref.WeakSet()

    def new_recorder(self) -> Any:
        """Return what makes graphs on this device; None if nothing does."""
        return CudaRecorder(self.device) if self.device.type == "cuda" else None

    def compile_ahead(self, steps: Callable[[], None]) -> int:
        if interpreted():
            return 0
        with Ahead() as ahead:
            steps()
        mark(self._marker())
        return ahead.num_kernels

    def compiled_before(self) -> bool:
        """Whether some model of these types was, on this chip, with these versions."""
        return interpreted() or self._marker().is_file()

    def _marker(self) -> Path:
        return marker(__version__, self.arithmetic, self.dtype, self.kv_dtype, str(self.quantization))

    def step_shape(self, tokens: int, sequences: int, rows: int) -> StepShape:
        if self.recorder is None:
            return StepShape(tokens, sequences, rows, "no")
        return self._ladder.up(tokens, sequences, rows)

    def stager(self) -> Stager:
        return PackedStager(self.device)

    def graph(self, build: Callable[[], Arrays]) -> Callable[[], Arrays]:
        return self._recording(build, False)

    def graph_pieces(self, build: Callable[[AttentionMetadata], Arrays]) -> Callable[[AttentionMetadata], Arrays]:
        return self._recording(build, True)

    def _recording(self, build: Callable[..., Arrays], in_pieces: bool) -> Recording:
        made = Recording(self, build, in_pieces)
        self._recordings.add(made)
        return made

    def graph_stats(self) -> GraphStats:
        made = list(self._recordings)
        return GraphStats(
            recordings=sum(bool(one.graphs) for one in made),
            graphs=sum(len(one.graphs) for one in made),
            seconds=sum(one.seconds for one in made),
            nbytes=sum(one.nbytes for one in made),
            failed=sum(one.failed for one in made),
        )
