"""What must be saved: fragments, manifests and objects, as pure data."""
