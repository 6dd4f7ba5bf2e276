"""Serving a model: engine, scheduler, cache, API. The scheduler knows no tensors."""
