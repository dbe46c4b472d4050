"""Arrays and ops. `backend.py` is the interface; `reference/` the spec in plain torch; `cpu/` numpy and Numba."""
