"""What programs call directly: backends as objects, lists of tensors, errors."""
