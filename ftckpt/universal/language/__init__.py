"""A specification language for the sharding of checkpoints that do not record it."""
