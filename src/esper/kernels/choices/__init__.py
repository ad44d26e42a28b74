"""Choices of a factored action, for one step of acting."""
