"""The CPU backend: numpy arrays, Numba kernels.

`simd.py` is the vocabulary, `linear.py`, `linear_int.py`, `attention.py`, `sampling.py` and others the algorithms in
it, `backend.py` the ops. `levels.py` says for which CPU, `jit.py` compiles and caches, `threads.py` and `team.py` run,
`formats.py` and `quantize.py` pack weights.
"""
