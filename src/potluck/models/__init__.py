"""Model families, their slices from disk, adapters, and what is saved; knows nothing of pools."""
