"""Text to windows of tokens. Knows nothing of the model."""
