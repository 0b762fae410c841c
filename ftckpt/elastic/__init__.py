"""Identity and restarts under torchrun and Slurm."""
