"""Modelworks: plan, verify, train, compress and serve language models from one run description.

Importing the package imports no torch, so that `modelworks --help` and pure arithmetic stay instant.
"""

__version__ = "0.1.0"
