"""`python -m shardtrain`: the command line where no script is installed."""

from shardtrain.cli import main

raise SystemExit(main())
