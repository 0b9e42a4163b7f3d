"""`python -m shardtrain`: the command line where no script is installed."""

from shardtrain.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
