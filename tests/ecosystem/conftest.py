"""Nothing here is downloaded: models are built from their configurations."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
