"""`python -m fedrema` is `fedrema`."""

from fedrema.cli import main

raise SystemExit(main())
