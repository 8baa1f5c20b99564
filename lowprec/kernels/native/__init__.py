"""The native backend: flattens tensors and calls the compiled core."""
