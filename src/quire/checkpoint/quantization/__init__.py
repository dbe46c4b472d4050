"""Pre-quantized checkpoints: their config, and their weights, each combined from several stored tensors.

`parse.py` reads `quantization_config` and refuses unsupported settings before any weight is read; one file for each
family of methods says which tensors make up a weight; `parts.py` replaces these by the weight, under the name that
models read; `tensors.py` has the classes of weights. `kernels` decides how backends store and multiply them.
"""
