"""Checkpoints that are quantized already: what their config says, and their parts put together as ordinary weights.

`parse.py` reads `quantization_config` and refuses what is not supported before any weight is read; one file for each
kind of method says which tensors make up a weight; `parts.py` presents those weights under the names that models read;
`tensors.py` are the weights. How backends store and multiply them is up to `kernels`.
"""
