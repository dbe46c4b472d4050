"""Kernels are compiled before they are needed, and then serve steps of all sizes; for a GPU that is not there."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from tests.helpers.pretend_gpu import run_compiling

NOTHING = """
import torch
from tests.helpers import pretend_gpu
from tests.kernels.gpu.test_compile_ahead import add_kernel
from quire.kernels.gpu.compile_ahead import CompileAhead

launched = []
pretend_gpu._PretendDriver.launcher_cls = lambda self, src, metadata: lambda *args: launched.append(args)
x = torch.zeros(16)
with pretend_gpu.pretend_gpu():
    for number in (1, 0):
        with CompileAhead() as ahead:
            add_kernel[(1,)](x, 16)
        assert (ahead.num_kernels, len(launched)) == (number, 0), "not even what is compiled already"
    add_kernel[(1,)](x, 16)
    assert len(launched) == 1
"""
SIZES = """
import pathlib, sys, tempfile
import numpy as np
from quire.checkpoint.hf_config import load_model_info
from quire.kernels.backend import SamplingOptions, StepLengths
from quire.kernels.gpu.graphs import CaptureSizes
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.pretend_gpu import pretend_gpu

with pretend_gpu() as compiled:
    from quire.kernels.gpu.backend import GPUBackend
    from quire.models.loader import load_model
    from quire.worker.graphs import Shape, dummy_inputs
    from quire.worker.model_runner import ModelRunner

    backend = GPUBackend("bfloat16", "bfloat16", "cpu", None if sys.argv[2] == "-" else sys.argv[2])
    backend.num_sms = 132
    info = load_model_info(write_checkpoint(pathlib.Path(tempfile.mkdtemp()), sys.argv[1]))
    runner = ModelRunner(load_model(info, backend), backend, num_blocks=300, block_size=16, max_num_seqs=80,
                         max_num_batched_tokens=512, max_model_len=1024)
    graphs, ladder = runner.graphs, CaptureSizes(512)
    graphs.compile_ahead()
    graphs.launch_all()
    before = len(compiled)
    decodes = [(n, n) for n in (1, 2, 3, 5, 8, 12, 16, 24, 30, 40, 64, 72, 80)]
    for tokens, sequences in [*decodes, (5, 1), (7, 2), (17, 1), (33, 3), (100, 16), (130, 1), (300, 20), (512, 64)]:
        size = ladder.up(tokens, sequences, sequences).within(512, 80)
        inputs = dummy_inputs(graphs._num_groups, tokens, sequences, 80)
        graphs._stage(inputs, size)
        full = size.graph_mode == "full"
        lengths = None if full else StepLengths(inputs.num_scheduled, inputs.seq_lens)
        shape = Shape(size)
        metadata = graphs._metadata(shape, size.sequences if full else sequences, lengths)
        _, logits, _ = graphs._build(shape, metadata)
        chances = np.full(len(logits), 0.5)
        backend.sample(logits, SamplingOptions(chances, np.full(len(logits), 2), chances, chances), chances)
    print("LATE", *(one.name for one in compiled[before:]))
"""


@triton.jit
def add_kernel(x, count):
    at = tl.arange(0, 16)
    tl.store(x + at, tl.load(x + at, at < count) + 1, at < count)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU of its own Triton needs no other")
def test_nothing_is_launched_while_kernels_are_compiled_ahead() -> None:
    run_compiling(NOTHING)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU of its own Triton needs no other")
@pytest.mark.parametrize(
    "model", ["llama -", "llama int8", "llama int4", "mixtral -", "qwen3_5_text -", "deepseek_v3 -"]
)
def test_kernels_that_are_compiled_ahead_serve_steps_of_all_sizes(model: str) -> None:
    late = run_compiling(SIZES, *model.split())[-1].split()[1:]
    assert [name for name in late if name not in ("_sort_pairs",)] == []
