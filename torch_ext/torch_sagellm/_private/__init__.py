"""Internals of the package that no program calls, such as loading the extension and registering the backend."""
