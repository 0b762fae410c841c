"""torchrun and Slurm: which job and node this is, and a restart that finds no dead peer's address."""
