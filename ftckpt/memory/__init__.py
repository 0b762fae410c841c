"""A node's memory: slots that are safetensors images, and the records of what is in them.

In: a manifest and a directory on tmpfs. Out: arenas, parity files, packages, and the account of who needs how much.
"""
