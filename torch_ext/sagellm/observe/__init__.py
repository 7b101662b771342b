"""What the groups of this process do and have done: statistics, explanations, exports, flight record, log."""
