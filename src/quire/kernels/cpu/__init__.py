"""The CPU backend: numpy arrays, Numba kernels.

`simd.py` and `simd_int.py` are the vocabulary, `linear.py`, `linear_int.py`, `attention.py`, `choose.py` and others the
algorithms in it, `backend.py` the ops. `levels.py` says for which CPU, `jit.py` compiles and caches, `threads.py` and
`team.py` run, `formats.py` and `quantize.py` pack weights.
"""
