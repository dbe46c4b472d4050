"""Compiling: the cache on disk, two processes at once, and CPUs with fewer instructions than this one."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from quire.kernels.cpu import jit, linear, rotary

# Runs a small kernel and prints whether it lay on disk before, whether it does now, and the result.
SHIFT = """
import numpy as np
from quire.kernels.cpu import rows
from quire.kernels.cpu.jit import refresh_cache
from quire.kernels.cpu.threads import Launcher
refresh_cache()
before = rows.shift_ids.is_cached()
found = rows.local_ids(Launcher(1), np.array([7, 3]), 5, 4)
print(before, rows.shift_ids.is_cached(), found.tolist())
"""

# Two ops of one body; large enough to be called, and not to become part of its callers.
TWINS = """
import ctypes
import numpy as np
from quire.kernels.cpu.jit import jit, op_of
from quire.kernels.cpu.pointers import i64_ptr

def body(value):
    @jit
    def items(args, first, last, scratch):
        out = i64_ptr(args[0])
        for item in range(first, last):
            total = value
            for k in range(item):
                if total % 7 == 3:
                    total = total * 3 + k
                elif total % 11 == 5:
                    total = total // 2 - k * 5
                else:
                    total += value * k - total % 13 * (k + 3)
            out[item] = total
    return items

OPS = {name: op_of(name, body(value)) for name, value in (("one", 1), ("two", 2))}
SIGNATURE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)

def run(name):
    out = np.zeros(4, np.int64)
    args = np.array([out.ctypes.data], np.int64)
    SIGNATURE(OPS[name].address)(args.ctypes.data, 0, 4, 0)
    return out.tolist()
"""

# Prints every op's results, so that two CPUs can be compared.
TOUR = """
import sys
import numpy as np
from tests.kernels.scenes import Paged, host, normal, round_to
from quire.kernels.backend import AttentionMetadata, AttentionParams, SamplingOptions
from quire.kernels.cpu.backend import CPUBackend
from quire.kernels.cpu.simd import TILE_ROWS
rng, results = np.random.default_rng(0), [np.array([TILE_ROWS])]
for dtype in ("float32", "bfloat16", "float16"):
    backend = CPUBackend(dtype, dtype, 1)
    x = round_to(normal(rng, 13, 40), "bfloat16")  # so that it does not matter whether `linear` rounds
    results.append(backend.linear(x, backend.pack_linear([host(normal(rng, 33, 40))])))
    scene = Paged.random(1, [40, 5], 16, 4, 2, 24)
    chunks = [(0, 3, 40), (1, 4, 5)]
    plain = CPUBackend(dtype, dtype, 1, dot_products=False)  # products of pairs round queries and weights
    results.append(scene.attend(plain, scene.cache(plain), AttentionParams(4, 2, 24, 0.2, softcap=2.0), chunks))
everything = [0, -0.0, 1e-8, 3e-8, 6e-5, 1 + 2**-11, 1 + 3 * 2**-11, 65519, 65520, np.inf, np.nan, -2]
everything = np.array(everything, np.float32)
cache = backend.new_kv_cache(1, 1, 1, 12)
backend.write_kv(everything[None], everything[None], cache, np.zeros(1, np.int64))
results.append(cache.values.view(np.float16).reshape(-1).astype(np.float32))
results.append(backend.rms_norm(normal(rng, 3, 33), normal(rng, 33), 1e-5))
gated = backend.pack_linear([host(normal(rng, 33, 40)) for _ in range(2)], gated=True)
results.append(backend.gated_linear(round_to(normal(rng, 3, 40), "bfloat16"), gated, "silu"))
results.append(backend.activation(normal(rng, 3, 33), "gelu"))
step = AttentionMetadata(np.array([0, 9], np.int32), np.array([9], np.int32), None, None, state_rows=np.zeros(1, int))
x, window = normal(rng, 9, 40), np.zeros((1, 3, 40), np.float32)
results.append(backend.causal_conv(x, normal(rng, 4, 40), None, window, step, "softplus"))
q, k, v = normal(rng, 9, 8), normal(rng, 9, 8) / 3, normal(rng, 9, 80)
rates = rng.random((9, 1)).astype(np.float32)
results.append(backend.gated_delta(q, k, v, -rates, rates, np.zeros((1, 1, 8, 80), np.float32), step))
logits = normal(rng, 4, 100)
options = SamplingOptions(np.ones(4), np.full(4, 9), np.full(4, 0.9), np.zeros(4))
results.append(backend.sample(logits, options, rng.random(4)))
results.append(backend.top_logprobs(logits, np.arange(4), 3).logprobs)
np.savez(sys.argv[1], *results)
"""


def start(code: str, cache: Path | None, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    """Run code with its own kernel cache, None for everyone's."""
    root = Path(__file__).resolve().parents[2]
    paths = os.pathsep.join([str(root), str(root / "src")])
    env = {**os.environ, "PYTHONPATH": paths, **environment}
    if cache is not None:
        env["NUMBA_CACHE_DIR"] = str(cache)
    return subprocess.Popen([sys.executable, "-c", code, *arguments], env=env, stdout=subprocess.PIPE, text=True)


def answer(process: subprocess.Popen[str]) -> str:
    """Wait for the process and return what it printed."""
    text, _ = process.communicate(timeout=250)
    assert process.returncode == 0
    return text.strip()


def test_two_processes_may_compile_at_once_and_later_ones_load(tmp_path: Path) -> None:
    for text in [answer(process) for process in [start(SHIFT, tmp_path) for _ in range(2)]]:
        assert text.endswith("True [2, 0]")
    assert answer(start(SHIFT, tmp_path)) == "True True [2, 0]"


@pytest.mark.slow
def test_ops_of_one_body_that_two_processes_have_compiled_stay_apart(tmp_path: Path) -> None:
    (tmp_path / "twins.py").write_text(TWINS)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import twins; print([*map(twins.run, sys.argv[1:])])"
    one, two = [1, -2, -45, -78], [2, -4, -11, -31]
    assert answer(start(code, None, "one")) == str([one])
    assert answer(start(code, None, "two")) == str([two])
    assert answer(start(code, None, "one", "two")) == str([one, two])


def test_a_changed_source_file_drops_what_was_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "cache_folder", lambda kernel: tmp_path)
    kernel = linear.FLOAT_OPS[np.dtype(np.float32)]
    ours, foreign = tmp_path / "linear.linear_float32-1.py311.nbi", tmp_path / "other.function-1.py311.nbi"
    jit.refresh_cache()
    assert not kernel.is_cached()
    ours.touch()
    foreign.touch()
    jit.refresh_cache()
    assert kernel.is_cached()
    monkeypatch.setattr(jit, "source_stamp", lambda: "another")
    assert not kernel.is_cached()
    jit.refresh_cache()
    assert not ours.exists()
    assert foreign.exists()


def test_a_folder_that_cannot_be_written_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    monkeypatch.setattr(jit, "cache_folder", lambda kernel: blocked / "cache")
    jit.refresh_cache()
    assert not rotary.rotate_rows.is_cached()


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="names x86 features")
@pytest.mark.parametrize(
    ("name", "features"), [("x86-64", ""), ("haswell", "+avx,+avx2,+fma,+f16c,+sse4.2,+bmi,+bmi2")]
)
def test_lesser_cpus_give_the_same_results(name: str, features: str, tmp_path: Path) -> None:
    levels = [(None, {}), (tmp_path / "cache", {"NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": features})]
    results = []
    for cache, environment in levels:
        answer(start(TOUR, cache, str(tmp_path / "results.npz"), **environment))
        with np.load(tmp_path / "results.npz") as arrays:
            results.append([arrays[key] for key in arrays.files])
    own, lesser = results
    assert lesser[0] == [2]
    for expected, got in zip(own[1:], lesser[1:], strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-5, rtol=1e-5)
