"""Structs that kernels take: what Triton, unlike its interpreter, does not forgive."""

from __future__ import annotations

import importlib
import pkgutil

from quire.kernels import gpu


def test_no_field_is_named_like_an_attribute_of_tritons_own_tuples() -> None:
    modules = [importlib.import_module(f"{gpu.__name__}.{info.name}") for info in pkgutil.iter_modules(gpu.__path__)]
    found = {made for module in modules for made in vars(module).values() if hasattr(made, "_fields")}
    structs = [made for made in found if made.__module__.startswith(gpu.__name__)]
    assert len(structs) > 10
    for struct in structs:
        assert not {"type", "value", "values"} & set(struct._fields), struct
