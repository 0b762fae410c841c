"""The command line ``ftckpt``: ``main`` has the table of commands and prints their ``answers``.

``targets`` has the one rule for what JOB, STORAGE and paths mean. ``report`` reads event logs (``event_log``) into
the ``history`` of the run (``attempts``, ``recovery``) with the ``timeline`` of one iteration, and shows them as text
and as a trace. ``status`` and ``jobs`` show the state of each node (``job_nodes``), ``list``, ``verify`` and ``pin``
the ``snapshots`` on storage and the ``slots`` in memory. ``check`` reports ``findings`` about the host, the device
and, with all ranks of a job, the network (``check_host``, ``check_device``, ``check_ranks``, ``check_pairs``).
``plan`` computes a job's protection as its start does (``plan_job``, ``plan_holdings``, ``plan_names``).
"""
