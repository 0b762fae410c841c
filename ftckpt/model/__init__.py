"""A job's state as data: fragments, manifests, objects, snapshots, topology, layouts, replica sets.

Pure: no torch.distributed, no files. Everything else is written in these words.
"""
