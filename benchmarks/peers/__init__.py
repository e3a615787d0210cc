"""The needs of the engines that we compare with: set-up scripts and checkpoint conversion."""
