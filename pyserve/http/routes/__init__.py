"""The ordinary endpoints, one Quart blueprint per API family."""
