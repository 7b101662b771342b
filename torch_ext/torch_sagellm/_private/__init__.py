"""Internals of the package that no program calls: loading, registering, options, variables, addresses."""
