"""Vectors: conversion between variables, tensors and NumPy arrays."""
