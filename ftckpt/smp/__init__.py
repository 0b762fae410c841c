"""The snapshot management process: one per node and job, outlives the trainers, protects what they sealed."""
