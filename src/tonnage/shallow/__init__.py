"""A deep network's requests from those of shallow ones.

Networks of three depths are run. What their requests have in common is a pattern in which the layers are stretches
that come once more for each further layer (`tokens`, `periods`); continued to the whole depth it says what the real
allocator is to be asked for (`requests`, `continuing`). `few` says of which networks.
"""
