"""`python -m tidemill_trainer` runs the command `tidemill`."""

import sys

from tidemill_trainer.cli import main

sys.exit(main())
