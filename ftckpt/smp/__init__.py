"""The snapshot management process (SMP): one per node and job, a daemon that outlives the trainers. No torch.

In: arenas that trainers write, requests, packages and chunks of other nodes. Out: checksums, parity, checkpoints.

* Protection: ``task_queue`` schedules ``checksum`` (sealed slots), ``encode`` (parity and packages of the target) and
  ``scrub`` (later corruption); ``arenas`` maps the node's arenas, ``chunk_source`` supplies bytes.
* Storage: ``flush_queue`` starts ``flush`` and ``final_flush`` (without trainers); ``export`` (other formats).
* Communication: ``channel`` (protocol), ``requests``, ``server``, ``peers``; for trainers ``client`` and ``watch``.
* The process: ``daemon``, ``footprint``; its use of the network: ``link`` (how much), ``traffic`` (when).

Records between nodes are always *authenticated* (AES-256-GMAC, keys derived from the job's secret and both nonces):
nobody on the network can take over a connection, or alter, insert or replay a record. With ``encrypt`` they are also
*sealed* (AES-256-GCM); without it an eavesdropper sees the job's state. Addresses, hellos, proofs and the lengths of
records are always in the clear.
"""

READY = b"ready\n"
"""The end of a detached SMP's output, once it answers. In this module because its starter may not import numpy."""

IDLE_SECS = 3600.0
"""An SMP ends after this time without a trainer: longer than a scheduler takes to restart the job on its node."""

MAX_SILENT_SECS = 60.0
"""Heartbeat age from which an SMP counts as hung. It has low priority, and beats between pieces of work."""
