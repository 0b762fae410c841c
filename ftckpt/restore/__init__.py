"""Restarts: inventory → decide → reconstruct → plan → read → load.

Input: the arenas of all nodes, storage, and the needs of this start's ranks. Output: live tensors, all verified.
"""
