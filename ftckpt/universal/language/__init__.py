"""The language that says where parts of parameters belong, for checkpoints that do not."""
