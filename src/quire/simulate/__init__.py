"""Runs the engine in virtual time: its scheduler and block manager, under a clock that a cost model moves.

Nothing of the scheduler is imitated here. What is simulated is the executor (how long a step takes) and the world
outside (when requests come).
"""
