"""Parity as pure data and arithmetic: who protects what, what a loss leaves, and the codes.

In: how the slots of all arenas are cut. Out: groups, stripes, blocks, the failures that are survived.
"""
