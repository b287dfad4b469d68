"""`python -m carpool` is the same as `carpool`."""

import sys

from carpool.cli import main

sys.exit(main())
