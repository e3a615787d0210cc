"""The digital twin: the scheduler that serves, on a virtual clock, with a model in the device's place.

`simulator` runs our own engine's decisions; `slot_engine` the same rules as an engine with slots has (vLLM),
compiled; `validate` holds predictions against recorded runs.
"""
