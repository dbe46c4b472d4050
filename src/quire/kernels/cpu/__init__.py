"""The CPU backend: numpy arrays, Numba kernels.

`simd.py` is the vocabulary, `linear.py`, `attention.py`, `elementwise.py` and `sampling.py` the algorithms in it,
`backend.py` the ops. `jit.py` compiles and caches, `threads.py` launches, `formats.py` packs weights.
"""
