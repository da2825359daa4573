"""Traces of routing: capture, file format, importers, data sets and scores."""
