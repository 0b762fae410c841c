"""One rank's session, from start to end, driven by the training thread.

In: configuration, training state, topology. ``checkpointer`` is the facade, ``vote`` the exchange between ranks,
``session`` the pure decisions (with ``interval``, ``replica_check``, ``vote_schedule``, ``protection_scheduler`` and
``flush_scheduler``), ``shard`` this rank's part of a snapshot, ``protection`` and ``node_smp`` its protection. Out:
snapshots in arenas, events.
"""
