"""A rank's session, from its start to its end, as the training thread drives it.

In: configuration, training state, topology. ``Checkpointer`` restores and takes snapshots, ``agreement`` is what all
ranks know of each other and how they reach each other, ``session`` decides (by ``cadence`` and ``targets``) and
touches nothing, ``shard`` is what this rank copies, ``protection`` and ``node_smp`` what guards it. Out: snapshots in
this node's arenas, events.
"""
