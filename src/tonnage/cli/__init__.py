"""The command line, one file per command.  Modules here import at their top only what `--help` needs."""
