"""The numbers of PyTorch's out-of-memory message are parsed."""

import estimates
from tonnage.estimates.shortage import Shortage, shortage
from tonnage.units import GIB, MIB


def test_message_of_torch_2():
    assert shortage(estimates.MESSAGE) == Shortage(
        asked_bytes=512 * MIB, free_bytes=256 * MIB, unallocated_bytes=9 * GIB
    )


def test_small_and_missing_numbers():
    text = "Tried to allocate 2.00 KiB. GPU 0 has a total capacity of 1.00 GiB of which 0 bytes is free."
    assert shortage(text) == Shortage(asked_bytes=2048, free_bytes=0, unallocated_bytes=None)


def test_other_texts_have_no_numbers():
    assert shortage("NCCL error 2") == Shortage(asked_bytes=None, free_bytes=None, unallocated_bytes=None)
