"""Block transfers in the short form that tests write them in: (kind, source, destination)."""

from __future__ import annotations

from collections.abc import Iterable

from quire.step import BlockTransfer, Tier, TransferOp

COPY, OUT, IN = "copy", "out", "in"  # within the device, to the host, from the host
Move = tuple[str, int, int]

KINDS = {
    (TransferOp.COPY, Tier.DEVICE): COPY,
    (TransferOp.STORE, Tier.HOST): OUT,
    (TransferOp.LOAD, Tier.HOST): IN,
}


def moves(transfers: Iterable[BlockTransfer]) -> list[Move]:
    """Return the transfers within memory."""
    found = []
    for each in transfers:
        kind = KINDS.get((each.op, each.tier))
        if kind is not None:
            source, destination = each.block_id, each.key
            found.append((kind, destination, source) if kind == IN else (kind, source, destination))
    return found


def transfers_of(moves: Iterable[Move]) -> list[BlockTransfer]:
    """Return the transfers that `moves` stand for."""
    kinds = {kind: place for place, kind in KINDS.items()}
    return [
        BlockTransfer(*kinds[kind], *((destination, source) if kind == IN else (source, destination)))
        for kind, source, destination in moves
    ]


def disk_store(block_id: int, slot: int, header: bytes) -> BlockTransfer:
    return BlockTransfer(TransferOp.STORE, Tier.DISK, block_id, slot, header)


def disk_load(block_id: int, slot: int, header: bytes) -> BlockTransfer:
    return BlockTransfer(TransferOp.LOAD, Tier.DISK, block_id, slot, header)


def disk_stores(transfers: Iterable[BlockTransfer]) -> list[BlockTransfer]:
    return [each for each in transfers if each.tier is Tier.DISK and each.op is TransferOp.STORE]


def disk_loads(transfers: Iterable[BlockTransfer]) -> list[BlockTransfer]:
    return [each for each in transfers if each.tier is Tier.DISK and each.op is TransferOp.LOAD]
