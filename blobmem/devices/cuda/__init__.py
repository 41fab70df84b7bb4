"""The CUDA device. Importing it imports no CUDA; making one does."""
