"""Files of other programs, written by pickle and torch and read without running code."""
