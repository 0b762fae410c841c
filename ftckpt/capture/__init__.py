"""Copies from live tensors, on the device or the host, into a slot in shared memory.

Input: the described training state, the replica sets, an arena, and the windows. Output: a sealed slot.
"""
