"""A node's shared memory: slots in safetensors format, and the records that describe their contents.

In: a manifest and a directory on tmpfs. Out: arenas, parity files, packages, and the ledger of memory.
"""
