"""What the engines we compare with need: set-up scripts and checkpoint conversion."""
