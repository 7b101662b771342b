"""What a communication backend has to offer, apart from how this package does it."""
