"""LoRA in torch: for each slot, its rows times its factors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quire.kernels.lora import LoRARows


@dataclass(frozen=True, slots=True)
class ReferenceLoRA:
    """A `LoRAChange` on the device, its values rounded to the backend's dtype."""

    a: torch.Tensor | None
    b: torch.Tensor | None
    whole: torch.Tensor | None


class ReferenceLoRASlots:
    """One layer's slots: for each, what its parts get; `sizes` are the columns of each part."""

    def __init__(self, num_slots: int, sizes: Sequence[int]) -> None:
        self.sizes = list(sizes)
        self.parts: list[list[ReferenceLoRA | None]] = [[None] * len(sizes) for _ in range(num_slots)]


def _slots_of(slots: ReferenceLoRASlots, rows: LoRARows) -> list[tuple[torch.Tensor, list[ReferenceLoRA | None]]]:
    """Return, for slots that have rows in this step, the rows and what the slot holds."""
    starts = rows.starts.tolist()
    return [
        (rows.order[start:stop], parts)
        for start, stop, parts in zip(starts[:-1], starts[1:], slots.parts, strict=True)
        if stop > start
    ]


def lora(y: torch.Tensor, x: torch.Tensor, slots: ReferenceLoRASlots, rows: LoRARows, compute: torch.dtype) -> None:
    """See `Backend.lora`. Each row is multiplied by itself, so that the others cannot show in it."""
    for mine, parts in _slots_of(slots, rows):
        column = 0
        for size, part in zip(slots.sizes, parts, strict=True):
            for row in mine.tolist() if part is not None else ():
                assert part is not None
                given = x[row].to(compute)
                if part.whole is not None:
                    y[row, column : column + len(part.whole)] = (part.whole.to(compute) @ given).float()
                if part.a is not None and part.b is not None:
                    inner = part.a.to(compute) @ given
                    y[row, column : column + len(part.b)] += (part.b.to(compute) @ inner).float()
            column += size


def lora_embedding(
    y: torch.Tensor, ids: torch.Tensor, slots: ReferenceLoRASlots, rows: LoRARows, compute: torch.dtype
) -> None:
    """See `Backend.lora_embedding`."""
    for mine, (part,) in _slots_of(slots, rows):
        for row in mine.tolist() if part is not None else ():
            assert part is not None
            token = int(ids[row])
            if part.whole is not None:
                y[row] = part.whole[token].float()
            if part.a is not None and part.b is not None:
                y[row] += (part.b.to(compute) @ part.a[:, token].to(compute)).float()


def limit_columns(x: torch.Tensor, limits: torch.Tensor) -> None:
    """See `Backend.limit_columns`."""
    for row, limit in enumerate(limits.tolist()):
        x[row, limit:] = -torch.inf
