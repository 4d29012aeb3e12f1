"""Calls a function of NVIDIA's that nobody has, out of a library whose functions are looked for when they are called.

unbound.py LIBRARY
"""

import ctypes
import os
import sys

import torch


def main() -> None:
    torch.ones(1, device="cuda")
    loader = ctypes.CDLL(None)
    opened, found, said = loader.dlopen, loader.dlsym, loader.dlerror
    opened.restype, found.restype, said.restype = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p
    library = opened(sys.argv[1].encode(), os.RTLD_LAZY)  # ctypes itself looks for all functions at once
    if not library:
        raise OSError(said().decode())
    ctypes.CFUNCTYPE(ctypes.c_int)(found(ctypes.c_void_p(library), b"go"))()


if __name__ == "__main__":
    main()
