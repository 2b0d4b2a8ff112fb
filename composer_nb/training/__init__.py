"""The trainer and what it is made of."""
