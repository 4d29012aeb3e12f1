"""The ghost GPU: the real PyTorch on a card that isn't there, always in a process of its own.

`native` is our implementation of NVIDIA's libraries, `wheel` finds or fetches a CUDA build of torch, `process`
puts both into the environment of a child, and `inside` runs there next to the user's program.
"""
