"""Evaluations of a matrix at one point, and for how long they are true."""
