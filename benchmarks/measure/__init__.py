"""Modules that the benchmark programs share: pure statistics, the cases, the report."""
