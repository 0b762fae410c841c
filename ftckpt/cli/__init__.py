"""The command line ``ftckpt``, one file a command.

In: words of the command line, arenas, events. Out: text, pages, and an exit status. ``report`` reads the lines of
event logs (``event_log``), makes of them the history of the run (``history``, ``attempts``, ``recovery``) and the
timeline of one iteration (``timeline``), and shows them as text, as a trace (``trace``), and as a page
(``report.html.j2``) whose ``sections`` have ``figures``.
``status`` and ``ls`` have what nodes tell (``job_nodes``), and ``check`` makes findings (``findings``) of the host,
of the device and, together with the other ranks, of the network (``check_host``, ``check_device``,
``check_ranks``, ``check_pairs``).
"""
