"""The parallel shape of a job: coordinates, nodes, replica sets and shares."""
