"""The universal format, which any layout can load, and what converts other checkpoints from and to it.

In: a checkpoint, of which a reader gives a catalog of fragments; or what a job left in memory. Consolidated: each
tensor whole, row by row as it is asked for. Out: the files of a writer, in a directory that is whole or not there.
"""
