"""`python -m jspec.cli`, the same as `jspec`."""

import sys

from jspec.cli.app import main

sys.exit(main())
