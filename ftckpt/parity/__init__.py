"""Parity as pure data and arithmetic: groups, stripes, codes, and what is recoverable after a loss.

In: the layout of all arenas' slots. Out: groups, stripes, blocks, the failures that the job survives.
"""
