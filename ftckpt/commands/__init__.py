"""The command line ``ftckpt``, one file a command.

In: words of the command line, arenas, events. Out: text, pages, and an exit status. ``timeline`` and ``report``
read whole lines of event logs (``event_log``), make of them the tracks of one iteration (``tracks``) and what the
run went through (``history``), and show them with one set of charts (``charts``) on one kind of page (``page``).
``status`` and ``ls`` have what nodes tell (``job_nodes``), and ``check`` makes findings (``findings``) of the host,
of the device and, together with the other ranks, of the network (``check_host``, ``check_device``,
``check_ranks``, ``check_pairs``).
"""
