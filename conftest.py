"""What holds for the tests of all packages."""

import os

# Ray would see `uv run pytest` and build the whole environment again for its workers. Read when Ray is imported.
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
