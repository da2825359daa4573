"""Files shipped with the package: the demo's model and prompts."""
