"""Drivers of serving engines, each run in the environment of its engine: see `_driver`."""
