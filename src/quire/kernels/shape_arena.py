"""`ShapeArena`: where the CPU backend's arena would put the arrays of a recording, for those who count memory ahead."""

from __future__ import annotations

from quire.kernels.cpu.arrays import SLAB_BYTES


class _Piece:
    """A piece of the arena; it is free again when the last array in it is gone."""

    __slots__ = ("_arena", "_generation", "_place", "_size")

    def __init__(self, arena: ShapeArena, generation: int, size: int, place: tuple[int, int]) -> None:
        self._arena, self._generation, self._size, self._place = arena, generation, size, place

    def __del__(self) -> None:
        self._arena.give_back(self._generation, self._size, self._place)


class ShapeArena:
    """Sizes of an `Arena`, see `kernels/cpu/arrays.py`: the same pieces at the same places, and no memory."""

    def __init__(self) -> None:
        self._slabs: list[int] = []
        self._touched: list[int] = []
        self._generation = 0
        self.restart()

    def restart(self) -> None:
        """Begin a new recording."""
        self._generation += 1
        self._slab, self._used = 0, 0
        self._free: dict[int, list[tuple[int, int]]] = {}

    @property
    def size(self) -> int:
        """Bytes taken from the system, touched or not."""
        return sum(self._slabs)

    @property
    def touched(self) -> int:
        """Bytes that were part of an array in some recording."""
        return sum(self._touched)

    def piece(self, size: int) -> _Piece:
        """Take a piece of `size` bytes."""
        waiting = self._free.get(size)
        place = waiting.pop() if waiting else self._new_piece(size)
        self._touched[place[0]] = max(self._touched[place[0]], place[1] + size)
        return _Piece(self, self._generation, size, place)

    def _new_piece(self, size: int) -> tuple[int, int]:
        while self._slab < len(self._slabs):
            if self._used + size <= self._slabs[self._slab]:
                start, self._used = self._used, self._used + size
                return self._slab, start
            self._slab, self._used = self._slab + 1, 0
        self._slabs.append(max(size, SLAB_BYTES))
        self._touched.append(0)
        self._used = size
        return self._slab, 0

    def give_back(self, generation: int, size: int, place: tuple[int, int]) -> None:
        """Have a piece used again, unless the recording it was made for has ended."""
        if generation == self._generation:
            self._free.setdefault(size, []).append(place)
