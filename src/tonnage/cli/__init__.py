"""The command line, with one file for each command.  At their top, these modules import only what `--help` needs."""
