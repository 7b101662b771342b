"""The functions and classes that programs call directly: backends as objects, lists of tensors, errors."""
