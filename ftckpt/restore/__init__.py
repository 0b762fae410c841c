"""From arenas back to the device: inventory, decide, plan, load."""
