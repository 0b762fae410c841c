"""``ftckpt run``: torchrun's agent, with workers forked from a server that has preloaded their imports.

| process | files | task |
|---|---|---|
| agent | `agent.py`, `workers.py`, `preload.py`, `rendezvous.py` | torch's elastic agent with faster reactions |
| server | `server.py`, `guard.py` | imports the modules of earlier attempts, and forks later workers |
| worker | `worker.py` | runs the unmodified script with ftckpt; also used by `-m ftckpt.megatron` |

`notes.py` reads and writes the files that workers leave for their agent.
"""
