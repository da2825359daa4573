"""``python -m daop``."""

from daop.cli.main import main

if __name__ == "__main__":
    main()
