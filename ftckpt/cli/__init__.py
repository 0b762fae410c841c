"""The command line ``ftckpt``, one file per command.

``report`` reads event logs (``event_log``), derives the history of the run (``history``, ``attempts``, ``recovery``)
and the timeline of one iteration (``timeline``), and shows them as text, as a trace, and as a page
(``report.html.j2``) of ``sections`` with ``figures``.
``status`` and ``ls`` show the state of each node (``job_nodes``). ``check`` reports ``findings`` about the host, the
device and, with all ranks of a job, the network (``check_host``, ``check_device``, ``check_ranks``, ``check_pairs``).
"""
