"""The part of the ghost that runs next to the user's program: standard library and torch only.

`bootstrap` installs the rest when torch is imported; `values` answers reads of computed values; `saves` keeps
checkpoints apart from the user's; `requested`, `repeating` and `micro_batches` repeat requests for memory without
their program.  `tonnage_recorder` records the run.
"""
