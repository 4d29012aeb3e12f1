"""The time model: seconds of a training step, without running it.

`timing` adds up a step from the Shape of its network (`shape`, `kinds`, `stacks`), the Work of a rank (`work`), the
rates of a card (`rates`) and the costs of the code that runs it (`software`).  `replay` prices a logged step instead,
operation by operation; `memory` estimates bytes where thousands of layouts are compared.
"""
