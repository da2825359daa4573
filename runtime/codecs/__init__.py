"""How the weights of an expert are written as bytes; one file per format."""
