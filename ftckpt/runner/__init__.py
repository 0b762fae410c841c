"""``ftckpt run``: torchrun's agent, whose workers are forked from a server that has imported what they import.

| process | files | what it does |
|---|---|---|
| agent | `agent.py`, `workers.py`, `preload.py`, `rendezvous.py` | torch's elastic agent, made to react at once |
| server | `server.py`, `guard.py` | imports what earlier attempts have imported, and forks later workers |
| worker | `worker.py` | runs the script as it is, with what its frameworks need; also under `-m ftckpt.megatron` |

`notes.py` has the files that workers write for their agent.
"""
