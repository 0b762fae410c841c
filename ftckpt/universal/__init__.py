"""The universal format, which any layout can load, and converters between it and other checkpoints.

A reader opens a checkpoint, or a job's snapshots in memory, as a catalog of fragments. ``Consolidator`` assembles
logical tensors from them, row by row on request. A writer writes the files of a directory that is complete or absent.
"""
