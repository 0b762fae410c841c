"""The snapshot management process: one per node and job, nobody's child, outlives the trainers. No torch.

In: arenas that trainers write, their requests, other nodes' SMPs. Out: checksums, parity, packages.

* guard: ``duties`` takes turns at ``check`` (checksums of sealed slots), ``cover`` (parity and packages of the
  target) and ``scrub`` (bytes that went bad since), on ``arenas`` as mapped here and ``sources`` of bytes.
* talk: ``channel`` (frames, proofs, deadlines; the protocol byte by byte), ``requests``, ``server``, ``ports``,
  ``client`` (a node's SMP as its trainers have it), ``peers`` (other nodes' as this one has them).
* ``daemon``: the process, ``footprint``: what it takes and leaves, ``link``: what of the network, ``traffic``: when.

What on the wire is which: between nodes, and in principle on one node too, every record is *authenticated* (AES-256
GMAC under keys made of the job's secret and both sides' nonces), so that nobody on the network can read on after the
handshake as somebody else, or alter, add or repeat anything; with ``encrypt`` it is *sealed* as well (AES-256-GCM).
Without it whoever listens on the network sees the state of the job. In the clear are always: addresses, the two
hellos and proofs, and the lengths of records.
"""

BUSY_STATUS = 3
"""Exit status of a starting SMP that found another one serving. Here, as what starts one may not import numpy yet."""

IDLE_SECS = 3600.0
"""Without any trainer, after which an SMP ends: longer than a scheduler takes to start the job again on its node."""
