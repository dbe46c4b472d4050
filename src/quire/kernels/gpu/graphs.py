"""CUDA graphs: a step of one shape captured once, full or piecewise, and replayed; and which shapes are captured.

A shape's first step is computed op by op, so that it waits for nothing but kernels to be compiled. Its second is, too,
on the capture stream, and is then captured: nothing is computed during a capture, so each step is computed exactly
once. From the third on the graph is replayed.

Piecewise graphs leave out the ops that depend on how a step's tokens belong to sequences, which are marked with
`splitting_op`. During a capture, a call of such an op ends the piece before it, is noted with its arguments, and the
next piece begins. On replay the op runs eagerly between the pieces, with the metadata of that step, lengths on the host
and `plans` included.
"""

from __future__ import annotations

import gc
import inspect
import logging
import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from triton.errors import TritonError

from quire.kernels.backend import Arrays, AttentionMetadata
from quire.kernels.gpu.arrays import ArrayOps
from quire.kernels.gpu.compile_ahead import CompileAhead, mark, marker
from quire.kernels.gpu.probe import interpreted
from quire.kernels.gpu.step_staging import PackedStager
from quire.kernels.steps import Stager, StepShape
from quire.version import __version__

# Steps of so many tokens and rows are captured piecewise. A quarter of padding costs less than an op by itself does.
_TOKENS: Final = (8, 16, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)
_ROWS: Final = (0, 8, 32, 64, 128)
_FINE, _COARSE = 128, 256  # steps of both ladders where they go on


def decode_sizes(most: int) -> list[int]:
    """Return the batch sizes that are captured, up to `most`, which is one of them.

    Small ones are close to each other, since there every row counts; from 16 on they are multiples of 8, as products
    of matrices want them, and above 256 of 16.
    """
    sizes = [1, 2, 4, 8, 12, 16, *range(24, 257, 8), *range(272, most + 16, 16)]
    return [*(size for size in sizes if size < most), most]


def token_sizes(most: int) -> list[int]:
    """Return the numbers of tokens of other steps that are captured, up to `most`, which is one of them."""
    sizes = [*_TOKENS, *range(_TOKENS[-1] + _FINE, most + _FINE, _FINE)]
    return [*(size for size in sizes if size < most), most]


class CaptureSizes:
    """Rounds steps of up to `most` tokens up to sizes that are captured."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._decode, self._tokens = decode_sizes(most), token_sizes(most)
        self._rows = [*_ROWS, *range(_COARSE, most + _COARSE, _COARSE)]

    def up(self, tokens: int, sequences: int, rows: int) -> StepShape:
        """Return the shape in which such a step is computed; see `Backend.step_shape`."""
        if tokens > self._most or (rows >= tokens and sequences != tokens):
            return StepShape(tokens, sequences, rows, "none")
        if tokens == sequences == rows:
            size = self._decode[bisect_left(self._decode, tokens)]
            return StepShape(size, size, size, "full")
        size = self._tokens[bisect_left(self._tokens, tokens)]
        padded = min(self._rows[bisect_left(self._rows, rows)], size - 1)  # all rows would be taken in order
        return StepShape(size, sequences, padded, "piecewise")


Shape = Callable[..., tuple[int, ...]]


def splitting_op(shape: Shape) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Mark an op, a method of a backend's group: piecewise graphs run it with the metadata of each step.

    Of the op: it takes an `AttentionMetadata` named `metadata`, and tensors, and returns one new tensor of `act`, whose
    shape is `shape(self, *the same arguments)`. If it has a parameter `out`, it may write the result there and return
    it; otherwise the result is copied, which costs a launch. Tensors among its arguments are temporary, or stay
    as long as the backend's model does. Rows that belong to no sequence may follow those that do. For example::

        @splitting_op(lambda self, q, cache, metadata, params: (q.shape[0], params.num_heads * params.out_size))
        def paged_attention(self, q, cache, metadata, params, out=None): ...
    """

    def mark(op: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(op)

        @wraps(op)
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            pieces: PiecewiseGraph | None = getattr(self, "pieces", None)
            if pieces is None:
                return op(self, *args, **kwargs)
            out = torch.empty(shape(self, *args, **kwargs), dtype=self.act, device=self.device)
            pieces.end()
            arguments = signature.bind(self, *args, **kwargs).arguments
            if "out" in signature.parameters:
                arguments["out"] = out
            pieces.calls.append(_EagerCall(op, arguments, out, pieces))
            pieces.begin()
            return out

        return run

    return mark


class _EagerCall:
    """A call of a marked op, to be repeated with other metadata.

    Of temporary tensors it has aliases: so the memory of all layers' activations is that of a few.
    """

    def __init__(
        self, op: Callable[..., Any], arguments: dict[str, Any], out: torch.Tensor, pieces: PiecewiseGraph
    ) -> None:
        self._op = op
        self._group = pieces.group_of(arguments["metadata"])
        self._arguments = {name: pieces.kept(value) for name, value in arguments.items()}
        self._out = pieces.kept(out)
        if "out" in arguments:
            self._arguments["out"] = self._out

    def run(self, metadata: Sequence[AttentionMetadata]) -> None:
        """Call the op; `metadata` has one for each group of layers."""
        result = self._op(**{**self._arguments, "metadata": metadata[self._group]})
        if result is not self._out:
            self._out.copy_(result)


class PiecewiseGraph:
    """A piecewise graph, in the making and afterwards. `metadata` is that of the step that is captured."""

    def __init__(self, capture: CUDAGraphCapture, metadata: AttentionMetadata) -> None:
        self._capture, self._metadata = capture, metadata
        self.graphs: list[torch.cuda.CUDAGraph] = []
        self.calls: list[_EagerCall] = []
        self._open: torch.cuda.CUDAGraph | None = None

    def begin(self) -> None:
        """Begin the next piece."""
        self._open = self._capture.begin()

    def end(self) -> None:
        """End the piece, if there is one that has begun; also after an error."""
        graph, self._open = self._open, None
        if graph is not None:
            self._capture.end(graph)
            self.graphs.append(graph)

    def finish(self) -> None:
        """Let go of what only the capture needed."""
        del self._metadata

    def kept(self, value: Any) -> Any:
        """Return an argument as it is noted: aliases in the place of tensors, also of those in a tuple."""
        if isinstance(value, torch.Tensor):
            return self._capture.alias(value)
        if type(value) is tuple:
            return tuple(self.kept(item) for item in value)
        return None if isinstance(value, AttentionMetadata) else value

    def group_of(self, metadata: AttentionMetadata) -> int:
        """Return the number of the group of layers whose metadata this is."""
        own = metadata.block_tables
        tables = [self._metadata.block_tables, *(table for table, _ in self._metadata.further)]
        return next(number for number, table in enumerate(tables) if table is own)

    def run(self, metadata: AttentionMetadata) -> None:
        """Run piece, op, piece, op and so on, with this step's metadata."""
        groups = [metadata, *(metadata.of_group(number) for number in range(1, 1 + len(metadata.further)))]
        self.graphs[0].replay()
        for call, graph in zip(self.calls, self.graphs[1:], strict=True):
            call.run(groups)
            graph.replay()


class _Memory:
    """Bytes on a device, as torch takes them in without keeping their owner."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
            "strides": None,
        }


def rebuild(raw: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return `raw`, the bytes that `tensor` spans, with its type, sizes and strides."""
    return raw.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())


def spanned(tensor: torch.Tensor) -> int:
    """Return how many bytes lie between the first of a tensor's elements and the end of its last."""
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return int(last + 1) * tensor.element_size()


def end_broken_capture(pool: Any) -> None:
    """Have torch forget a capture that broke off, and its pool.

    Its allocator goes on asking the graph about every piece of memory, and random numbers are refused, as if it were
    still under way.
    """
    device = torch.cuda.current_device()
    with suppress(RuntimeError, AttributeError):  # it knew, or never does
        torch._C._cuda_endAllocateToPool(device, pool)
    with suppress(RuntimeError, AttributeError):
        generator = torch.cuda.default_generators[device]
        generator.graphsafe_set_state(generator.clone_state())


class CUDAGraphCapture:
    """Makes CUDA graphs on one device, which share one pool of memory; captures restrict their own thread only."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()  # that have the pool
        self._broken: list[torch.cuda.CUDAGraph] = []

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Compute on the stream that captures, after what was launched before, and before what is launched after."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Be ready to capture: on the stream for it, with no garbage collected, which might call the driver.

        A pool ends with its last graph: torch takes no more captures for it then.
        """
        if not self._graphs:
            self._pool = torch.cuda.graph_pool_handle()
        collects = gc.isenabled()
        gc.disable()
        try:
            with self.aside():
                yield
        except BaseException:
            self._pool = torch.cuda.graph_pool_handle()  # one whose capture broke off is not taken again
            self._graphs.clear()
            raise
        finally:
            if collects:
                gc.enable()

    def begin(self) -> torch.cuda.CUDAGraph:
        """Capture launches from now on, in this thread, instead of computing."""
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        self._graphs.add(graph)
        return graph

    def end(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a capture; a graph whose capture broke off is kept, for torch may go on asking it."""
        try:
            graph.capture_end()
        except RuntimeError:
            self._broken.append(graph)
            end_broken_capture(self._pool)
            raise

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return another tensor of the same memory that does not keep it: the pool may give it to others."""
        nbytes = spanned(tensor)
        if nbytes == 0:
            return tensor
        return rebuild(torch.as_tensor(_Memory(tensor.data_ptr(), nbytes), device=self._device), tensor)


logger = logging.getLogger(__name__)


class CUDAGraphWrapper:
    """A step of one shape, called with its metadata if it is piecewise."""

    def __init__(self, owner: GraphOps, build: Callable[..., Arrays], piecewise: bool) -> None:
        self._owner, self._build, self._piecewise = owner, build, piecewise
        self._calls = 0
        self._run: Callable[..., None] | None = None
        self._outputs: Arrays = ()
        self.graphs: list[torch.cuda.CUDAGraph] = []
        self.failed = False

    def __call__(self, *metadata: AttentionMetadata) -> Arrays:
        """Compute a step, in this or that way; what is returned is overwritten by the next graph that runs."""
        if self._run is not None:
            self._run(*metadata)
            return self._outputs
        self._calls += 1
        capture = self._owner.capture
        if capture is None or self.failed or self._calls == 1:
            return self._build(*metadata)
        with capture.aside():
            outputs = self._build(*metadata)
        try:
            with capture.capturing():
                self._capture_step(capture, *metadata)
        except (RuntimeError, TritonError) as error:
            self.failed, self.graphs = True, []
            logger.warning("a step could not be captured and stays slower than it might be: %s", _cause(error))
        return outputs

    def _capture_step(self, capture: Any, *metadata: AttentionMetadata) -> None:
        if self._piecewise:
            self._capture_piecewise(capture, metadata[0])
            return
        graph = capture.begin()
        try:
            outputs = self._build()
        finally:
            capture.end(graph)
        self._outputs = _aliases(capture, outputs)
        self.graphs, self._run = [graph], graph.replay

    def _capture_piecewise(self, capture: Any, metadata: AttentionMetadata) -> None:
        pieces = PiecewiseGraph(capture, metadata)
        self._owner.pieces = pieces
        pieces.begin()
        try:
            outputs = self._build(metadata)
        finally:
            self._owner.pieces = None
            pieces.end()
        pieces.finish()
        self._outputs = _aliases(capture, outputs)
        self.graphs, self._run = pieces.graphs, pieces.run


def _cause(error: BaseException) -> BaseException:
    """Return the first of a chain of errors: one that breaks a capture makes its end fail, too."""
    while error.__context__ is not None:
        error = error.__context__
    return error


def _aliases(capture: Any, outputs: Arrays) -> Arrays:
    """Return the outputs of a graph without keeping their memory from the graphs to come."""
    return tuple(None if output is None else capture.alias(output) for output in outputs)


class GraphStats(NamedTuple):
    """Steps that are captured, the graphs that they consist of (full ones of one each), and steps that could not be."""

    captured: int
    graphs: int
    failed: int


class GraphOps(ArrayOps):
    """CUDA graphs.

    Attributes:
        capture: makes them, see `new_capture`; None with `enforce_eager`, and in Triton's interpreter.
        pieces: the piecewise graph that is being captured, or None.
    """

    pads = True
    pieces: PiecewiseGraph | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.capture: Any = None if self.enforce_eager else self.new_capture()
        self._capture_sizes = CaptureSizes(self.max_cudagraph_capture_size)
        self._wrappers: weakref.WeakSet[CUDAGraphWrapper] = weakref.WeakSet()

    def new_capture(self) -> Any:
        """Return what makes graphs on this device; None if nothing does."""
        return CUDAGraphCapture(self.device) if self.device.type == "cuda" else None

    def compile_ahead(self, steps: Callable[[], None]) -> int:
        if interpreted():
            return 0
        with CompileAhead() as ahead:
            steps()
        mark(self._marker())
        return ahead.num_kernels

    def compiled_before(self) -> bool:
        """Whether some model of these types was, on this chip, with these versions."""
        return interpreted() or self._marker().is_file()

    def _marker(self) -> Path:
        return marker(__version__, self.arithmetic, self.dtype, self.kv_dtype, str(self.quantization))

    def step_shape(self, tokens: int, sequences: int, rows: int) -> StepShape:
        if self.capture is None:
            return StepShape(tokens, sequences, rows, "none")
        return self._capture_sizes.up(tokens, sequences, rows)

    def stager(self) -> Stager:
        return PackedStager(self.device)

    def graph(self, build: Callable[[], Arrays]) -> Callable[[], Arrays]:
        return self._wrapper(build, False)

    def piecewise_graph(self, build: Callable[[AttentionMetadata], Arrays]) -> Callable[[AttentionMetadata], Arrays]:
        return self._wrapper(build, True)

    def _wrapper(self, build: Callable[..., Arrays], piecewise: bool) -> CUDAGraphWrapper:
        made = CUDAGraphWrapper(self, build, piecewise)
        self._wrappers.add(made)
        return made

    def graph_stats(self) -> GraphStats:
        """Count the graphs that exist."""
        made = list(self._wrappers)
        return GraphStats(
            captured=sum(bool(one.graphs) for one in made),
            graphs=sum(len(one.graphs) for one in made),
            failed=sum(one.failed for one in made),
        )
