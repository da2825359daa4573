"""Hardware profiles (TOML), with the source of every figure."""
