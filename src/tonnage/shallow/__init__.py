"""The requests of a deep network, derived from those of shallow ones.

Networks of three depths are run.  Their requests share a pattern in which the layers are stretches that occur once
more for each further layer (`tokens`, `periods`).  Extended to the whole depth it gives the requests for the real
allocator (`requests`, `continuing`).  `depths` tells which networks qualify.
"""
