"""Every way to guess tokens, one file each, after one protocol (:mod:`.protocol`)."""
