"""What every integration of a framework must pass, whatever the framework: one suite, run through an adapter."""
