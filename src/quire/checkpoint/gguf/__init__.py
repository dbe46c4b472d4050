"""GGUF, ggml's file format: config, tokenizer and weights in one file, the weights often in few bits.

`reader.py` reads and checks the header; `blocks.py` decodes the block formats of weights, `tensors.py` has weights in
them; `names.py` and `config.py` map ggml's tensor names and metadata to transformers' names and config.json;
`source.py` opens all weights of a file under transformers' names. `quire.tokenizer.gguf` builds the tokenizer.
"""
