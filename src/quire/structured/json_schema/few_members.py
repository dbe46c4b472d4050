"""Objects of at most two properties, by listing which these can be.

That is how demands are kept that some property must fulfil, together with a limit on how many there are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quire.structured.json_schema import regular
from quire.structured.json_schema.emptiness import ObjectPlan
from quire.structured.json_schema.errors import too_complex, unsupported
from quire.structured.json_schema.shapes import All, ObjectShape, join

if TYPE_CHECKING:
    from quire.structured.json_schema.emit import Emitter

_MAX_PARTS = 24


@dataclass(frozen=True)
class _Part:
    """One property: its terminal, the demand on its value, its name if that is listed, and what it is an example of."""

    terminal: str
    demand: All
    name: str | None
    kinds: frozenset[Any]


def few_members(emitter: Emitter, plan: ObjectPlan, shape: ObjectShape, pointer: str) -> list[str]:
    """Return expressions whose union is the objects of `shape`, which has at most two properties."""
    assert shape.most is not None and shape.most <= 2
    parts = list(_parts(emitter, plan))
    if len(parts) > _MAX_PARTS and shape.most == 2:
        raise too_complex(pointer, "too many pairs of properties")
    texts = emitter.texts
    found: dict[str, None] = {}
    for must, never in plan.clauses:
        demanded = [kind for kind in must if isinstance(kind, tuple) and kind[0] == "value"]
        if demanded and shape.most != 1:
            raise unsupported(demanded[0][3], "its negation, as names may repeat")
        if shape.least == 0 and not must:
            found[""] = None
        for part in parts if shape.most else ():
            if part.name in never or not must <= _proof(part, demanded):
                continue
            value = join(part.demand, *(kind[2] for kind in demanded))
            if shape.least <= 1 and not emitter.emptiness.of_demand(value, pointer):
                found[f"{part.terminal} {emitter.value(value)}"] = None
        if shape.most == 2:
            found |= dict.fromkeys(_pairs(emitter, parts, must, never, shape.least, pointer))
    return [f"{texts.open_object} {members} {texts.close_object}".replace("  ", " ") for members in found]


def _parts(emitter: Emitter, plan: ObjectPlan) -> Iterator[_Part]:
    for name, demand in plan.names.items():
        terminal = emitter.texts.name(regular.text(name))
        yield _Part(terminal, demand, name, frozenset((name,)))
    for part in plan.free:
        kinds = frozenset(("language", language) for language in part.kinds)
        yield _Part(emitter.texts.name(part.language), part.demand, None, kinds)


def _proof(part: _Part, demanded: list[Any]) -> frozenset[Any]:
    """Return what is there if `part` is, given that its value will be made to fulfil what is `demanded`."""
    own = {
        kind
        for kind in demanded
        if ("language", kind[1]) in part.kinds or (part.name is not None and regular.matches(kind[1], part.name))
    }
    return part.kinds | own


def _pairs(
    emitter: Emitter, parts: list[_Part], must: frozenset[Any], never: frozenset[Any], least: int, pointer: str
) -> Iterator[str]:
    for first in parts:
        for second in parts:
            if first.name in never or second.name in never or not must <= first.kinds | second.kinds:
                continue
            if first is second and first.name is not None:
                continue
            if first is second and least == 2:
                raise unsupported(f"{pointer}/minProperties", "more properties than are named; names may repeat")
            yield (
                f"{first.terminal} {emitter.value(first.demand)} {emitter.texts.comma} "
                f"{second.terminal} {emitter.value(second.demand)}"
            )
