"""Operations on one step: compiled kernels for each device, and plain torch for all devices."""
