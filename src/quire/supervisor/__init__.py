"""The parent process of `quire serve`: it holds the listening socket, and starts, watches and replaces its children.

Children are the fronts (`quire.server`: HTTP, tokenizing) and the engines (`quire.engine`). Nothing here imports code
of others, and nothing reads what clients send beyond the request line of a probe, so that nothing a client or a model
folder contains can end this process.
"""
