"""Functions and classes that programs call directly: backends, lists of tensors, compression, recovery, errors."""
