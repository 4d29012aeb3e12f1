"""What runs inside a ghosted process, next to the user's program: standard library and torch only.

`bootstrap` installs the rest when torch is imported; `watch` notes phases, modules and owners of memory;
`values` says what reads of computed values give; `outcome` notes how the program ended; `written` puts it all
into a file that `tonnage.trace.trace` reads.  On a machine with a real GPU the same code records real runs.
"""
