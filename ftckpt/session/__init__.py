"""One rank's session, from start to end, driven by the training thread.

In: configuration, training state, topology. ``checkpointer`` is the facade, ``session`` the pure decisions (with
``replica_check``, ``protection_scheduler`` and ``flush_scheduler``), ``vote`` the exchange between ranks,
``snapshot_driver`` executes decisions. ``rank_context`` has the parts: ``arenas``, ``protection``, ``node_smp``,
``attempt``. ``shard`` is this rank's part of a snapshot; ``start`` and ``shutdown`` are the two ends. Out: snapshots
in arenas, events.
"""
