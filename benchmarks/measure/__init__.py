"""Shared by the benchmark programs: pure statistics, the cases, the report."""
