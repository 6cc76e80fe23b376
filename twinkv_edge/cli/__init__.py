"""The command line, one file per command. Nothing here is imported by the library."""
