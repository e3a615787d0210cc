from interpreting import patch_interpreter

patch_interpreter()
