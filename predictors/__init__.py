"""Forecasts of expert activations: one file per predictor."""
