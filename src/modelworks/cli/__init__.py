"""The command line: one file per command, which parses, composes rooms and prints."""
