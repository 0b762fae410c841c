"""Copies from live tensors, on the device or the host, into a slot in shared memory.

In: described training state, the replica sets, an arena, the windows. Out: a sealed slot.
"""
