"""Live training state of torch, as every framework keeps it: tensors as pieces, optimizers, generators."""
