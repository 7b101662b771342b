"""The interface of a communication backend, without the implementation of this package."""
