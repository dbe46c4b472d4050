"""Recordings in pieces: ops that depend on how a step's tokens belong to sequences stand aside from what is recorded.

Such an op is marked with `follows_step`. While a step is recorded in pieces, a call of it ends the piece before it, is
noted with its arguments, and the next piece begins. When the recording runs, so does the op, as if it were called by
the model: from the memory that the piece before it has filled, with the metadata of the step of that time, lengths on
the host and `plans` included. Everywhere else a marked op is what it was before.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Protocol

import torch

from quire.kernels.backend import AttentionMetadata

Shape = Callable[..., tuple[int, ...]]


class Graph(Protocol):
    """One recording of launches; `torch.cuda.CUDAGraph` is one."""

    def replay(self) -> None:
        """Launch all of it again."""


class Recorder(Protocol):
    """Makes graphs; see `graphs_cuda.py`. All that it makes share one pool of memory, which belongs to them."""

    def begin(self) -> Graph:
        """Note launches from now on, in this thread, instead of computing."""

    def end(self, graph: Graph) -> None:
        """Stop doing so."""

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return another tensor of the same memory that does not keep it: the pool may give it to others."""


def follows_step(shape: Shape) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Mark an op, a method of a backend's group: recordings in pieces run it with the metadata of each step.

    Of the op: it takes an `AttentionMetadata` and tensors, and returns one new tensor of `act`, whose shape is
    `shape(self, *the same arguments)`. If it has a parameter `out`, it may write the result there and return it;
    otherwise the result is copied, which costs a launch. Tensors among its arguments are temporary, or stay
    as long as the backend's model does. Rows that belong to no sequence may follow those that do. For example::

        @follows_step(lambda self, q, cache, metadata, params: (q.shape[0], params.num_heads * params.out_size))
        def paged_attention(self, q, cache, metadata, params, out=None): ...
    """

    def mark(op: Callable[..., Any]) -> Callable[..., Any]:
        takes_out = "out" in inspect.signature(op).parameters

        @wraps(op)
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            pieces: Pieces | None = getattr(self, "pieces", None)
            if pieces is None:
                return op(self, *args, **kwargs)
            out = torch.empty(shape(self, *args, **kwargs), dtype=self.act, device=self.device)
            pieces.end()
            pieces.asides.append(_Aside(op, takes_out, self, args, kwargs, out, pieces))
            pieces.begin()
            return out

        return run

    return mark


class _Aside:
    """A call of a marked op, to be repeated with other metadata.

    Of temporary tensors it has aliases: so the memory of all layers' activations is that of a few.
    """

    def __init__(
        self,
        op: Callable[..., Any],
        takes_out: bool,
        backend: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: torch.Tensor,
        pieces: Pieces,
    ) -> None:
        self._op, self._backend = op, backend
        place = next((i for i, arg in enumerate(args) if isinstance(arg, AttentionMetadata)), None)
        metadata = kwargs["metadata"] if place is None else args[place]
        self._group = pieces.group_of(metadata)
        self._args = [pieces.kept(arg) for arg in args]
        self._kwargs = {name: pieces.kept(arg) for name, arg in kwargs.items()}
        self._place = place
        self._out = pieces.kept(out)
        if takes_out:
            self._kwargs["out"] = self._out

    def run(self, metadata: Sequence[AttentionMetadata]) -> None:
        """Call the op; `metadata` has one for each group of layers."""
        own = metadata[self._group]
        if self._place is None:
            self._kwargs["metadata"] = own
        else:
            self._args[self._place] = own
        result = self._op(self._backend, *self._args, **self._kwargs)
        if result is not self._out:
            self._out.copy_(result)


class Pieces:
    """A recording in pieces, in the making and afterwards. `metadata` is that of the step that is recorded."""

    def __init__(self, recorder: Recorder, metadata: AttentionMetadata) -> None:
        self._recorder, self._metadata = recorder, metadata
        self.graphs: list[Graph] = []
        self.asides: list[_Aside] = []
        self._open: Graph | None = None

    def begin(self) -> None:
        """Begin the next piece."""
        self._open = self._recorder.begin()

    def end(self) -> None:
        """End the piece, if there is one that has begun; also after an error."""
        graph, self._open = self._open, None
        if graph is not None:
            self._recorder.end(graph)
            self.graphs.append(graph)

    def finish(self) -> None:
        """Let go of what only recording needed."""
        del self._metadata

    def kept(self, value: Any) -> Any:
        """Return an argument as it is noted: aliases in the place of tensors, also of those in a tuple."""
        if isinstance(value, torch.Tensor):
            return self._recorder.alias(value)
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
        for aside, graph in zip(self.asides, self.graphs[1:], strict=True):
            aside.run(groups)
            graph.replay()
