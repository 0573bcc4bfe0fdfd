"""Files to examples to batches; knows tokenizers, nothing of models."""
