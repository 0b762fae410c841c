"""From the device into a slot: plan, copier, windows, fence."""
