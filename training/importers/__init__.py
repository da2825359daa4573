"""Traces that other engines recorded: one file per format, each a function from path to trace."""
