"""GGUF, ggml's file format: config, tokenizer and weights in one file, the weights often in few bits.

`reader.py` checks a file and finds what is in it; `blocks.py` knows the formats of weights, `tensors.py` are the
weights; `names.py` and `config.py` say what ggml calls what transformers calls otherwise; `source.py` offers all of a
file's weights under transformers' names. The tokenizer is made in `quire.tokenizer.gguf`.
"""
