"""Modules that the benchmark programs share: cases, clocks, starting ranks, statistics, reports."""
