"""The digital twin: the production scheduler on a virtual clock, with a cost model in place of the device.

`simulator` runs our own engine's decisions; `slot_engine` runs the rules of an engine with slots (vLLM),
compiled; `validate` compares predictions with recorded runs.
"""
