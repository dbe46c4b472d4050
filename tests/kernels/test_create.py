"""Choosing a backend, asking for memory."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from quire.errors import ConfigError
from quire.kernels.cpu import linear, linear_int
from quire.kernels.cpu.attention import plan
from quire.kernels.cpu.attention_kernels import ATTEND, merge
from quire.kernels.cpu.backend import CPUBackend
from quire.kernels.cpu.jit import Op
from quire.kernels.cpu.kv_write import WRITE
from quire.kernels.create import create_backend
from quire.kernels.memory import available_memory

MIB = 1 << 20


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_backends_say_what_they_hold(device: str) -> None:
    backend = create_backend(device, "bfloat16", "float16", None)
    assert (backend.name, backend.dtype, backend.kv_dtype) == (device, "bfloat16", "float16")
    assert 0 < backend.available_memory() < os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.mark.parametrize(
    ("arguments", "param", "words"),
    [
        (("cpu", "float32", "fp8", None), "kv_cache_dtype", "needs a GPU.*int8"),
        (("cpu", "float32", "float32", None, "fp8"), "quantization", "needs a GPU.*int8"),
        (("cpu", "float32", "float32", 0), "num_threads", "0; allowed: 1 to"),
        (("cpu", "float32", "float32", 100000), "num_threads", "100000.*1 to"),
    ],
)
def test_a_bad_choice_is_named_with_what_is_allowed(arguments: tuple, param: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        create_backend(*arguments)
    assert caught.value.param == param


def test_without_torch_the_reference_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "torch" else find(name, *rest))
    with pytest.raises(ConfigError, match=r"quire\[reference\]"):
        create_backend("reference", "float32", "float32", None)


def test_the_cpu_backend_imports_no_torch() -> None:
    code = (
        "import sys, json; from quire.kernels.create import create_backend;"
        "create_backend('cpu', 'float32', 'float32', None); print(json.dumps('torch' in sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(result.stdout) is False


def test_only_uncompiled_kernels_keep_a_user_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    assert create_backend("reference", "float32", "float32", None).compiled_before()
    cpu = create_backend("cpu", "float32", "float32", None)
    for answer in (True, False):
        monkeypatch.setattr("quire.kernels.cpu.jit.Op.is_cached", lambda op, answer=answer: answer)
        assert cpu.compiled_before() is answer


@pytest.mark.parametrize(
    ("quantization", "products"),
    [
        (None, {linear.FLOAT_OPS[np.dtype(np.float32)]}),
        ("int8", {linear_int.OPS[8, False]}),
        ("int8-weight-only", {linear_int.FLOAT_OP}),
        ("int4", {linear_int.OPS[4, False], linear_int.OPS[8, False]}),
    ],
)
@pytest.mark.parametrize("threads", [1, 2])
def test_every_kernel_that_decoding_needs_counts_as_such(
    monkeypatch: pytest.MonkeyPatch, quantization: str | None, products: set[Op], threads: int
) -> None:
    cpu = CPUBackend("float32", "float32", threads, quantization, dot_products=False)
    asked: list[Op] = []
    monkeypatch.setattr("quire.kernels.cpu.jit.Op.is_cached", lambda op: asked.append(op) or True)
    assert cpu.compiled_before()
    products = {*products, *([merge] if threads == 2 else [])}
    assert set(asked) == {*products, WRITE[np.dtype(np.float32)], plan, ATTEND[np.dtype(np.float32)]}


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_arrays_go_there_and_back(device: str) -> None:
    backend = create_backend(device, "float32", "float32", None)
    frozen = np.arange(6, dtype=np.int32).reshape(2, 3)
    frozen.flags.writeable = False
    for array in (frozen, frozen.T, frozen.astype(np.int64), frozen.astype(np.float32), frozen > 2):
        back = backend.to_numpy(backend.from_numpy(array))
        assert back.dtype == array.dtype
        np.testing.assert_array_equal(back, array)
    halves = [backend.from_numpy(np.full((2, n), n, np.float32)) for n in (1, 3)]
    assert backend.to_numpy(backend.concat(halves)).tolist() == [[1, 3, 3, 3]] * 2
    assert backend.to_numpy(backend.zeros((2, 2))).dtype == np.float32
    assert backend.to_numpy(backend.zeros((3,), "int64")).tolist() == [0, 0, 0]


def write(root: Path, files: dict[str, str]) -> Path:
    """Write a make-believe /proc and /sys."""
    for name, text in {"proc/meminfo": "MemTotal: 9 kB\nMemAvailable:  1048576 kB\n", **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_memory_is_what_the_system_has_available(tmp_path: Path) -> None:
    assert available_memory(write(tmp_path, {})) == 1024 * MIB
    unlimited = {"proc/self/cgroup": "0::/job\n", "sys/fs/cgroup/job/memory.max": "max\n"}
    assert available_memory(write(tmp_path, unlimited)) == 1024 * MIB


def test_memory_respects_every_control_group_above_the_process(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/outer/inner\n",
        "sys/fs/cgroup/outer/inner/memory.max": f"{800 * MIB}\n",
        "sys/fs/cgroup/outer/inner/memory.current": f"{100 * MIB}\n",
        "sys/fs/cgroup/outer/memory.max": f"{500 * MIB}\n",
        "sys/fs/cgroup/outer/memory.current": f"{300 * MIB}\n",
        "sys/fs/cgroup/outer/memory.stat": f"anon 1\ninactive_file {50 * MIB}\n",
    }
    assert available_memory(write(tmp_path, files)) == 250 * MIB


def test_memory_respects_old_control_groups_and_containers(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "3:cpu:/x\n5:memory:/docker/abc\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{64 * MIB}\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{70 * MIB}\n",
        "sys/fs/cgroup/memory/memory.stat": f"total_inactive_file {16 * MIB}\n",
    }
    assert available_memory(write(tmp_path, files)) == 10 * MIB
    assert available_memory(write(tmp_path, {"sys/fs/cgroup/memory/memory.usage_in_bytes": f"{99 * MIB}"})) == 0
