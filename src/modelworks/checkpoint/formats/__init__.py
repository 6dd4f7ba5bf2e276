"""Readers and writers of model files: safetensors, Hugging Face directories, GGUF."""
