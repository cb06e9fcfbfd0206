"""Draws from distributions: without building an object, and from one that is built at each step."""
