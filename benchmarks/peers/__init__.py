"""The parts of `cpu_peers.py`: other engines behind one small protocol, their processes, their models, the report."""
