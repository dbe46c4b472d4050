"""SIMD levels: what this CPU has, forcing less, and that the first choice holds for a process."""

from __future__ import annotations

import json
import platform
import typing
from pathlib import Path

import llvmlite.binding as llvm
import numba
import pytest

from quire.config import DeviceConfig
from quire.errors import ConfigError
from quire.kernels.cpu import levels
from quire.kernels.create import create_backend
from quire.options import option_fields
from tests.kernels.test_compile import answer, start

ON_X86 = pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="names x86 levels")

# Settles a level, computes a small op, and prints what the process found: its level, the flags that kernels go by,
# the result, whether the op was loaded from disk, and whether 512-bit registers are used.
COMPUTE = """
import json, sys
import numpy as np
from quire.errors import ConfigError
from quire.kernels.create import create_backend
from quire.kernels.cpu import levels
backend = create_backend("cpu", "float32", "float32", 1, simd_level=sys.argv[1])
from quire.kernels.cpu import norms, simd, threads
out = norms.rms_norm(threads.Launcher(1), np.arange(6, dtype=np.float32)[None], np.ones(6, np.float32), 1e-5)
compiled = norms.rms_norm_rows._compiled
refused = []
for other in sys.argv[2:]:
    try:
        create_backend("cpu", "float32", "float32", 1, simd_level=other)
    except ConfigError as error:
        refused.append(error.message)
wide = not compiled.cache_hits and "zmm" in compiled._library.get_asm_str()
found = dict(level=levels.current_level(), bf16=simd.HAS_BF16_DOT, rows=simd.TILE_ROWS, half=simd.HAS_HALF)
print(json.dumps(dict(found, out=out.tolist(), cached=bool(compiled.cache_hits), wide=wide, refused=refused)))
"""


def compute(level: str, cache: Path | None, *others: str) -> dict[str, typing.Any]:
    return json.loads(answer(start(COMPUTE, cache, level, *others)))


def test_the_options_choices_are_the_levels() -> None:
    (option,) = [item.option for item in option_fields((DeviceConfig,)) if item.name == "simd_level"]
    assert option.choices == (levels.AUTO, *levels.LEVELS, levels.GENERIC)


@ON_X86
def test_levels_follow_from_the_features_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(*features: str) -> tuple[str, ...]:
        monkeypatch.setattr(llvm, "get_host_cpu_features", lambda: dict.fromkeys(features, True))
        return levels.available_levels()

    assert found("sse2") == ("generic",)
    assert found(*levels.AVX2) == ("avx2", "generic")
    assert found(*levels.AVX512, "avx512vnni") == ("avx512", "avx2", "generic")
    assert found(*levels.AVX512, "avx512vnni", "avx512bf16") == ("avx512-bf16-vnni", "avx512", "avx2", "generic")
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    assert found("neon") == ("neon", "generic")


@ON_X86
def test_a_level_above_the_cpu_is_refused_with_those_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llvm, "get_host_cpu_features", lambda: dict.fromkeys(levels.AVX2, True))
    for level in ("avx512", "neon"):
        with pytest.raises(ConfigError, match=f"'{level}' is not allowed; .* one of auto, avx2, generic$") as caught:
            create_backend("cpu", "float32", "float32", simd_level=level)
        assert caught.value.param == "simd_level"


def test_the_reference_has_no_levels() -> None:
    assert create_backend("reference", "float32", "float32", simd_level="auto").name == "reference"
    with pytest.raises(ConfigError, match="device 'reference' has no levels"):
        create_backend("reference", "float32", "float32", simd_level="generic")


def test_a_process_that_has_kernels_cannot_change_its_level() -> None:
    create_backend("cpu", "float32", "float32")
    before = numba.config.CPU_NAME, numba.config.CPU_FEATURES
    assert levels.select_level(None) == levels.select_level("auto") == levels.current_level()
    with pytest.raises(ConfigError, match="compiles for 'auto' already, so it must be auto, or be chosen in a new"):
        create_backend("cpu", "float32", "float32", simd_level="generic")
    assert before == (numba.config.CPU_NAME, numba.config.CPU_FEATURES)


@ON_X86
def test_numbas_own_choice_of_a_cpu_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba.config, "CPU_NAME", "nocona")
    assert levels.select_level("auto") == "nocona"
    with pytest.raises(ConfigError, match="compiles for 'nocona' already"):
        levels.select_level("generic")


@pytest.mark.slow
@ON_X86
def test_a_forced_level_compiles_for_less_and_keeps_its_own_cache(tmp_path: Path) -> None:
    own = levels.available_levels()
    results = {}
    for level in own:
        results[level] = compute(level, tmp_path, "auto", level, *own)
    for level, found in results.items():
        assert found["level"] == level
        assert not found["cached"]
        assert found["wide"] == ("avx512" in level)
        assert found["rows"] == (8 if "avx512" in level else 2)
        assert found["bf16"] == ("bf16" in level)
        assert found["half"] == (level != "generic")
        assert found["out"][0] == pytest.approx(results["generic"]["out"][0], rel=1e-6)
        assert len(found["refused"]) == len(own) - 1
        assert all(f"compiles for '{level}' already" in message for message in found["refused"])
    for level in own:
        assert compute(level, tmp_path)["cached"]
