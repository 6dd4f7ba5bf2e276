"""`python -m modelworks`: the command line, for launchers that start a module on every machine."""

from modelworks.cli.main import run

run()
