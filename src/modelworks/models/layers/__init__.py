"""The layers that every family is made of. Each is single-device and knows nothing of how a run is split."""
