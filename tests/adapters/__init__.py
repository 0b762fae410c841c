"""The frameworks as the conformance suite sees them: each adapter builds its example job of ``launch/``."""
