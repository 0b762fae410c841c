"""``ftckpt run``: torchrun's agent, whose workers are forked from a server that has imported what they import.

| process | file | what it does |
|---|---|---|
| agent | `agent.py`, `workers.py`, `preload.py` | torch's elastic agent: starts workers, sees at once when one has ended |
| server | `server.py`, `guard.py` | imports what the first attempt has imported, and forks the workers of later ones |
| worker | `worker.py`, `record.py` | runs the script as it is, with what the frameworks that it imports need |
"""
