"""Checkpoints on storage: backends, shard files, commit, retention, and exports to other formats.

An object on storage is either complete or absent.
"""
