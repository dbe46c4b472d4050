"""The engine: one loop of schedule, execute, update, and the ways to reach it. Imports no torch and no kernels."""
