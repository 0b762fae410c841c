"""Files of other programs: what pickle and torch put into them, read without running code."""
