"""From a node's memory to storage: what lies there outlives the job, its nodes and the allocation.

In: bytes of snapshots. Out: objects on storage, each of them whole or not there.
"""
