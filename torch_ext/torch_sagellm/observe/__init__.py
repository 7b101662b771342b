"""Observes groups: statistics, explanations, exports, flight records, steps, status files, log."""
