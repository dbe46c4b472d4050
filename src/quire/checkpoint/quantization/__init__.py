"""Checkpoints that are quantized already: what their config says, their parts put together as ordinary weights.

`parse.py` reads `quantization_config` and refuses what is not supported before any weight is read; one file for each
method says which tensors make up a weight; `source.py` presents those weights under the names that models ask for;
`tensors.py` are the weights. How they are held and multiplied is up to `kernels`.
"""
