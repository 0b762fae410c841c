"""Pictures and traces of one iteration, from the timelines in the event logs."""
