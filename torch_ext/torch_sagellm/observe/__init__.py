"""Observes the groups of this process: statistics, explanations, exports, flight record, log."""
