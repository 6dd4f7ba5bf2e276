"""Evaluation: validation loss, samples, and public question sets through lm-eval."""
