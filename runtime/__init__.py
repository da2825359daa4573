"""Runs models: checkpoints, residency, transfers, compute, policies, executor and simulator."""
