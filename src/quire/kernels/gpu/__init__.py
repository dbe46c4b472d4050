"""The GPU backend: torch tensors, Triton kernels, and cuBLAS through torch.

`backend.py` is the list of what there is. No kernel is looked for elsewhere: what Triton compiles is in these files.
"""
